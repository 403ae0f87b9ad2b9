"""An engine's errors in the envelope of the gateway."""

from __future__ import annotations

import json

import pytest

from gateway.http.exchange import request_ids
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
def test_a_parameter_is_named_as_clients_write_it(
    message: str, location: str | None, param: str | None, code: str | None
) -> None:
    assert json.loads(refused(message, location).body())["error"] == {
        "message": message,
        "type": "invalid_request_error",
        "param": param,
        "code": code,
    }


@pytest.mark.parametrize("given", [b"bad id", b"x" * 129, "\u00e9".encode(), b"", None])
def test_an_invalid_request_id_is_replaced(given: bytes | None) -> None:
    assert request_ids(given)[0] not in (b"", given)
