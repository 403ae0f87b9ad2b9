"""What is ours to say is said once, and the rest are the bytes that came."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.protocol import body as bodies
from gateway.protocol.paths import ROUTES
from gateway.protocol.splice import UpstreamBody, upstream_body

SALT = b'"5a17"'
CHAT = ROUTES["/v1/chat/completions"]


def out(raw: bytes, salt: bytes = SALT, path: str = "/v1/chat/completions") -> UpstreamBody:
    return upstream_body(ROUTES[path], bodies.read(raw), raw, salt)


def said(sent: UpstreamBody) -> bytes:
    whole = sent.parts if isinstance(sent.parts, bytes) else b"".join(sent.parts)
    assert len(whole) == sent.size
    return whole


def test_with_nothing_to_say_it_is_the_very_body_that_came() -> None:
    raw = b'{"model":"m","messages":[],"cache_salt":"own"}'
    sent = out(raw, salt=b"")
    assert sent.parts is raw
    assert not sent.counts


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b'{"model":"m"}', b'{"cache_salt":"5a17","model":"m"}'),
        (b'{"model":"m","cache_salt":"other\'s"}', b'{"model":"m","cache_salt":"5a17"}'),
        (b'{"model":"m", "cache_salt" : null }', b'{"model":"m", "cache_salt" : "5a17" }'),
        (
            b'{"model":"m","metadata":{"cache_salt":"x"}}',
            b'{"cache_salt":"5a17","model":"m","metadata":{"cache_salt":"x"}}',
        ),
    ],
)
def test_the_salt_is_the_tenants_whatever_the_client_says(raw: bytes, expected: bytes) -> None:
    assert said(out(raw)) == expected


@pytest.mark.parametrize(
    "path",
    ["/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/score", "/v1/rerank"],
)
def test_all_that_prompts_go_through_is_salted(path: str) -> None:
    assert json.loads(said(out(b'{"model":"m"}', path=path)))["cache_salt"] == "5a17"


@pytest.mark.parametrize("path", ["/v1/tokenize", "/v1/detokenize"])
def test_what_caches_nothing_is_not(path: str) -> None:
    raw = b'{"model":"m"}'
    assert out(raw, path=path).parts is raw


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        (..., True),
        (None, True),
        ({}, True),
        ({"include_usage": False}, True),
        ({"include_usage": True}, False),
    ],
)
def test_a_stream_counts_its_tokens_for_us_too(options: Any, counts: bool) -> None:
    body: dict[str, Any] = {"model": "m", "stream": True}
    if options is not ...:
        body["stream_options"] = options
    sent = out(json.dumps(body).encode())
    asked = json.loads(said(sent))
    assert asked == {**body, "cache_salt": "5a17", "stream_options": {"include_usage": True}}
    assert sent.counts is counts


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_streams_that_count_by_themselves_are_not_asked(path: str) -> None:
    raw = b'{"model":"m","stream":true}'
    sent = out(raw, salt=b"", path=path)
    assert sent.parts is raw
    assert not sent.counts
