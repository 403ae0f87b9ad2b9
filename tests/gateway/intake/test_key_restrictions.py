"""What a key allows: features, and the longest answer, which requests that name none get as their bound."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.intake.key_restrictions import bound_answer, check_features
from gateway.protocol.body import AcceptedBody, BodyRules, accept
from gateway.protocol.errors import Refused
from gateway.protocol.json_splice import upstream_body
from gateway.protocol.paths import ROUTES
from policy.config.tenancy import Feature

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


def accepted(path: str, raw: bytes) -> AcceptedBody:
    return accept(raw, ROUTES[path], BodyRules())


def bounded(path: str, raw: bytes) -> Any:
    """What a replica decodes of the body, with at most 10 tokens an answer."""
    body = accepted(path, raw).body
    bound_answer(ROUTES[path], body, 10)
    if body.added:
        name, value = json.loads(b"{%b}" % body.added[1:]).popitem()
        assert getattr(body, name) == json.loads(bytes(body.members[name])) == value
    sent = upstream_body(ROUTES[path], body, raw, b"").parts
    return json.loads(sent if isinstance(sent, bytes) else b"".join(sent))


@pytest.mark.parametrize(
    ("path", "given", "field"),
    [
        (CHAT, {}, "max_tokens"),
        (CHAT, {"max_tokens": None, "max_completion_tokens": None}, "max_tokens"),
        (CHAT, {"max_output_tokens": 5}, "max_tokens"),
        (TEXT, {"max_completion_tokens": 5}, "max_tokens"),
        (TEXT, {"max_tokens": None}, "max_tokens"),
        ("/v1/messages", {}, "max_tokens"),
        (RESPONSES, {"max_tokens": 5}, "max_output_tokens"),
    ],
)
def test_a_request_without_a_bound_gets_one(path: str, given: dict[str, Any], field: str) -> None:
    raw = json.dumps({"model": "m", **given}).encode() + b" \n"
    assert bounded(path, raw) == {"model": "m", **given, field: 10}


def test_a_completion_without_a_bound_gets_that_of_its_api_if_it_is_lower() -> None:
    body = accepted(TEXT, b'{"model":"m"}').body
    bound_answer(ROUTES[TEXT], body, 4096)
    assert body.max_tokens == 16


@pytest.mark.parametrize("given", [{"max_tokens": 10}, {"max_completion_tokens": 3}, {"max_tokens": 0}])
def test_a_request_within_the_bound_is_left_as_it_is(given: dict[str, int]) -> None:
    assert bounded(CHAT, json.dumps({"model": "m", **given}).encode()) == {"model": "m", **given}


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/tokenize", "/v1/messages/count_tokens"])
def test_what_answers_no_text_is_not_bounded(path: str) -> None:
    assert bounded(path, b'{"model":"m","max_tokens":99}') == {"model": "m", "max_tokens": 99}


@pytest.mark.parametrize(
    ("path", "given", "param"),
    [
        (CHAT, {"max_tokens": 11}, "max_tokens"),
        (CHAT, {"max_tokens": 5, "max_completion_tokens": 11}, "max_completion_tokens"),
        (RESPONSES, {"max_output_tokens": 11}, "max_output_tokens"),
    ],
)
def test_a_request_for_more_is_refused(path: str, given: dict[str, int], param: str) -> None:
    with pytest.raises(Refused, match="at most 10 tokens") as caught:
        bounded(path, json.dumps({"model": "m", **given}).encode())
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, "max_tokens_exceeded")


def test_features_that_a_key_does_not_allow_are_refused() -> None:
    chat = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    plain, logprobs = (
        accepted(CHAT, json.dumps(body).encode()).body for body in (chat, chat | {"logprobs": True})
    )
    check_features(ROUTES[CHAT], plain, frozenset())
    check_features(ROUTES[CHAT], logprobs, frozenset({Feature.LOGPROBS}))
    with pytest.raises(Refused, match="does not allow logprobs") as caught:
        check_features(ROUTES[CHAT], logprobs, frozenset({Feature.TOOLS}))
    assert (caught.value.status, caught.value.code) == (403, "feature_not_allowed")
