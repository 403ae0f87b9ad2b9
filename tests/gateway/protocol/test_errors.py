"""Errors in the gateway's envelope: an engine's, and those of request bodies that are refused."""

from __future__ import annotations

import json

import pytest

from gateway.http.asgi_exchange import request_ids
from gateway.protocol import errors
from gateway.protocol.body import read
from gateway.protocol.errors import Refused, from_upstream
from gateway.protocol.paths import ROUTES, ApiDialect
from gateway.protocol.sse_validator import ResponsesValidator

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


KEPT = (
    TOO_LONG,
    "The model `a/b` does not exist. Use max_tokens/2 or 1/2; see /v1/models at 12:30, 4::int, a::b",
    "1 validation error for {'type': 'missing', 'loc': ('body', 'input')}: and/or either/or",
    "Value error, n must be 1 when using greedy sampling, got 2. (type=value_error) 0x12",
)
SCRUBBED = {
    "a\nTraceback (most recent call last):\n  File x": "a",
    "see https://docs.internal:80/x?y, or wss://h": "see [URL] or [URL]",
    "cannot open /root/models/a-b/config.json: no such file": "cannot open [path]: no such file",
    "in ~/.cache/huggingface/hub and ./a/b/c": "in [path] and [path]",
    "vllm/entrypoints/openai/api_server.py line 3": "[path] line 3",
    "connect to 10.0.0.7:8000 or 127.0.0.1, localhost:80": "connect to [address] or [address], [address]",
    "at [fe80::1]:80 and 2001:db8:0:0:0:0:0:1, ::1.": "at [address] and [address], [address].",
    "<Engine object at 0x7f00deadbeef>": "<Engine object at [address]>",
    "at a-b/c.py, /v1/a/b.py, //x//a/b.py and a.py/b": "at [path], /[path], //x//[path] and a.py/b",
    "x  \n Traceback (most recent call last)": "x",
    "key sk-proj-abcdefgh12 or Bearer abc": "key [key] or [key]",
}


@pytest.mark.parametrize(
    "text",
    [
        "a/",
        "a-",
        "-/",
        "/a",
        "//",
        "a.py/",
        "\n ",
        ":",
        "[:",
        "1.",
        "1:",
        "~/",
        "a:",
        "bearer ",
        "sk-",
        "::1",
    ],
)
def test_a_longer_message_takes_no_more_for_each_character(text: str) -> None:
    """The square of 256 KiB has no end."""
    for pattern, instead in errors._INTERNALS:
        pattern.sub(instead, f"[{text * ((1 << 18) // len(text))}!")


@pytest.mark.parametrize(("message", "told"), [*zip(KEPT, KEPT, strict=True), *SCRUBBED.items()])
def test_what_an_engine_says_of_its_host_is_left_out(message: str, told: str) -> None:
    assert refused(message, None).message == told
    for event in ({"error": {"message": message}}, {"type": "error", "message": message}):
        relayed = ResponsesValidator().feed(b"data: %b\n\n" % json.dumps(event).encode())
        assert json.loads(relayed.partition(b"data: ")[2])["message"] == told
    failed = {"type": "response.failed", "response": {"error": {"message": message}}}
    relayed = ResponsesValidator().feed(b"data: %b\n\n" % json.dumps(failed).encode())
    assert json.loads(relayed.partition(b"data: ")[2])["response"]["error"]["message"] == told


@pytest.mark.parametrize("text", ["a", "\0", "é", "😀", '"', "\\"])
@pytest.mark.parametrize("api", ApiDialect)
def test_an_error_takes_4_kib_at_most(text: str, api: ApiDialect) -> None:
    error = {"message": text * 1700, "param": text * 1700, "code": text * 1700}
    found = from_upstream(400, json.dumps({"error": error}).encode(), None, CHAT)
    assert len(found.event(api)) <= 4096
    assert max(len(found.body()), len(found.body(anthropic=True))) <= 4096
    assert json.loads(found.body())["error"]["message"].strip(text) == ""


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
