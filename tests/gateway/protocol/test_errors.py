"""Errors in the gateway's envelope: an engine's, and those of request bodies that are refused."""

from __future__ import annotations

import json

import pytest

from gateway.http.asgi_exchange import request_ids
from gateway.protocol.body import read
from gateway.protocol.errors import Refused, from_upstream
from gateway.protocol.paths import ROUTES

CHAT = ROUTES["/v1/chat/completions"]
TOO_LONG = "This model's maximum context length is 2048 tokens. However, you requested 4000 tokens."


def refused(message: str, param: str | None) -> Refused:
    error = {"message": message, "type": "BadRequestError", "param": param, "code": 400}
    return from_upstream(400, json.dumps({"error": error}).encode(), None, CHAT)


@pytest.mark.parametrize(
    ("message", "location", "param", "code"),
    [
        ("no", "body.messages", "messages", None),
        ("no", "body.messages.0.ChatCompletionUserMessageParam.content", "messages.0.content", None),
        ("no", "body", None, None),
        ("no", "temperature", "temperature", None),
        ("no", None, None, None),
        (TOO_LONG, "input_tokens", "messages", "context_length_exceeded"),
    ],
)
def test_parameter_names(message: str, location: str | None, param: str | None, code: str | None) -> None:
    assert json.loads(refused(message, location).body())["error"] == {
        "message": message,
        "type": "invalid_request_error",
        "param": param,
        "code": code,
    }


@pytest.mark.parametrize("given", [b"bad id", b"x" * 129, "\u00e9".encode(), b"", None])
def test_an_invalid_request_id_is_replaced(given: bytes | None) -> None:
    assert request_ids(given)[0] not in (b"", given)


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        (b"", None, None),
        (b"{", None, None),
        (b"[]", None, None),
        (b'"x"', None, None),
        (b'{"model":"alpha"} x', None, None),
        (b"{}", "model", None),
        (b'{"model":null}', "model", None),
        (b'{"model":7}', "model", None),
        (b'{"model":"alpha","stream":"yes"}', "stream", None),
        (b'{"model":"alpha","n":"2"}', "n", None),
        (b'{"model":"alpha","n":9}', "n", None),
        (b'{"model":"alpha","n":0}', "n", None),
        (b'{"model":"alpha","stop":["a","b","c","d","e"]}', "stop", None),
        (b'{"model":"alpha","priority":1}', "priority", "unsupported"),
        (b'{"model":"alpha","chat_template":"x"}', "chat_template", "unsupported"),
        (
            b'{"model":"alpha","chat_template_kwargs":{"chat_template":"x"}}',
            "chat_template_kwargs.chat_template",
            "unsupported",
        ),
        (b'{"model":"alpha","chat_template_kwargs":7}', "chat_template_kwargs", None),
        (b'{"model":"alpha","chat_template_kwargs":{"\xff":1}}', "chat_template_kwargs", None),
        (b'{"model":"alpha","previous_response_id":"r"}', "previous_response_id", "unsupported"),
        (b'{"model":"alpha","background":true}', "background", "unsupported"),
        (b'{"model":"alpha","x":' + b"[" * 70 + b"]" * 70 + b"}", None, None),
        (b'{"model":"alpha","x":' + b"[" * 5000 + b"]" * 5000 + b"}", None, None),
    ],
)
def test_a_bad_body_is_refused_with_its_parameter(body: bytes, param: str | None, code: str | None) -> None:
    with pytest.raises(Refused) as caught:
        read(body)
    error = caught.value
    assert (error.status, error.type, error.param, error.code) == (400, "invalid_request_error", param, code)
    assert len(error.body()) < 4096


def test_defaults_that_clients_write_out_pass() -> None:
    written = b'{"model":"a","prompt_logprobs":null,"use_beam_search":false,"background":false,"stop":null}'
    assert read(written).model == "a"
