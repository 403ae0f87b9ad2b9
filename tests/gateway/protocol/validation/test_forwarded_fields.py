"""Fields that are known reach a replica, byte by byte; all others do not."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.protocol.body import BodyRules
from gateway.protocol.errors import Refused
from gateway.protocol.json_splice import upstream_body
from gateway.protocol.paths import ROUTES
from gateway.protocol.restricted_features import used_features
from gateway.protocol.validation.forwarded_fields import KNOWN, STEERING
from policy.config.tenancy import Feature
from tests.gateway.protocol.accepted_body import accepted_body
from tests.gateway.protocol.agent_sessions import claude_code, codex, openai_chat

CHAT = "/v1/chat/completions"
LARGE = {"filler": "a" * 300_000}
NAMES = st.sampled_from(["x", "priority_", "(media)", "(prompts)", "\0", "é", "tokens", "prompt", "members"])


@pytest.mark.slow
@given(
    st.dictionaries(NAMES, st.integers() | st.text(max_size=3) | st.just([{"a": 1}]), max_size=4),
    st.sampled_from([{}, LARGE]),
    st.booleans(),
)
def test_unknown_fields_are_left_out_and_named(
    unknown: dict[str, Any], padding: dict[str, Any], ascii_only: bool
) -> None:
    known = {"model": "m", "temperature": 0.5, "messages": [{"role": "user", "content": "é"}], **padding}
    raw = json.dumps({**unknown, **known}, ensure_ascii=ascii_only).encode()
    accepted = accepted_body(raw)
    assert sorted(accepted.dropped) == sorted(unknown)
    assert (accepted.raw is raw) is (not unknown)
    sent = b"".join(upstream_body(ROUTES[CHAT], accepted.body, accepted.raw, b'"s"', "other").parts)
    assert json.loads(sent) == {**known, "model": "other", "cache_salt": "s"}
    assert (accepted.body.media, accepted.body.prompts) == (0, 1)


@pytest.mark.parametrize("padding", [b"", b',"filler":"%b"' % (b"a" * 300_000)])
def test_no_spelling_of_an_unknown_name_passes(padding: bytes) -> None:
    accepted = accepted_body(b'{"x":1,"\\u0078":2,"model":"a","m\\u006fdel":"m","x":3%b}' % padding)
    assert accepted.dropped == ["x"]
    assert json.loads(accepted.raw, object_pairs_hook=len) == 1 + bool(padding)
    assert accepted.body.model == "m"


def test_a_deployment_adds_names() -> None:
    rules = BodyRules(extra_fields=frozenset({"ebnf"}))
    accepted = accepted_body({"model": "m", "ebnf": "a", "x": 1}, rules=rules)
    assert (accepted.dropped, json.loads(accepted.raw)) == (["x"], {"model": "m", "ebnf": "a"})


@pytest.mark.parametrize("path", KNOWN)
@pytest.mark.parametrize("name", STEERING)
def test_what_steers_an_engine_is_refused_on_every_route(path: str, name: str) -> None:
    with pytest.raises(Refused, match=f"{name} is not accepted"):
        accepted_body({"model": "m", name: 1}, path)
    assert accepted_body({"model": "m", name: None}, path).dropped == []


@pytest.mark.parametrize("name", STEERING)
def test_a_false_number_that_steers_as_0_is_refused(name: str) -> None:
    if name == "prompt_logprobs":
        with pytest.raises(Refused, match="prompt_logprobs is not accepted"):
            accepted_body({"model": "m", name: False})
    else:
        assert accepted_body({"model": "m", name: False}).dropped == []


@pytest.mark.parametrize(
    ("client", "path"), [(claude_code, "/v1/messages"), (codex, "/v1/responses"), (openai_chat, CHAT)]
)
def test_agents_lose_nothing(client: Callable[[int], Iterator[bytes]], path: str) -> None:
    for raw in client(8):
        accepted = accepted_body(raw, path)
        assert (accepted.raw, accepted.dropped, accepted.body.media) == (raw, [], 0)
        assert used_features(accepted.body, ROUTES[path]) == {Feature.TOOLS}


@pytest.mark.long
@pytest.mark.parametrize(
    ("path", "module", "structure"),
    [
        (CHAT, "openai.types.chat.completion_create_params", "CompletionCreateParamsStreaming"),
        ("/v1/completions", "openai.types.completion_create_params", "CompletionCreateParamsStreaming"),
        ("/v1/embeddings", "openai.types.embedding_create_params", "EmbeddingCreateParams"),
        ("/v1/responses", "openai.types.responses.response_create_params", "ResponseCreateParamsStreaming"),
        ("/v1/messages", "anthropic.types.beta.message_create_params", "MessageCreateParamsStreaming"),
        (
            "/v1/messages/count_tokens",
            "anthropic.types.beta.message_count_tokens_params",
            "MessageCountTokensParams",
        ),
    ],
)
def test_all_parameters_of_the_clients_are_known(path: str, module: str, structure: str) -> None:
    keys = getattr(importlib.import_module(module), structure)
    assert (keys.__required_keys__ | keys.__optional_keys__) - KNOWN[path] - {"extra_headers"} == set()


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_all_parameters_of_vllm_are_known() -> None:
    structures = {
        "openai.chat_completion": {CHAT: "ChatCompletionRequest"},
        "openai.completion": {"/v1/completions": "CompletionRequest"},
        "openai.responses": {"/v1/responses": "ResponsesRequest"},
        "anthropic": {
            "/v1/messages": "AnthropicMessagesRequest",
            "/v1/messages/count_tokens": "AnthropicCountTokensRequest",
        },
        "pooling.embed": {"/v1/embeddings": "EmbeddingCompletionRequest EmbeddingChatInputRequest"},
        "pooling.scoring": {
            "/v1/score": "ScoreDataRequest ScoreQueriesDocumentsRequest ScoreQueriesItemsRequest "
            "ScoreTextRequest",
            "/v1/rerank": "RerankRequest",
        },
        "serve.tokenize": {
            "/v1/tokenize": "TokenizeCompletionRequest TokenizeChatRequest",
            "/v1/detokenize": "DetokenizeRequest",
        },
    }
    for module, by_path in structures.items():
        protocol = importlib.import_module(f"vllm.entrypoints.{module}.protocol")
        for path, names in by_path.items():
            fields = {field for name in names.split() for field in getattr(protocol, name).model_fields}
            assert fields - KNOWN[path] - set(STEERING) == set(), path
