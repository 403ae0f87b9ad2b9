"""What an upstream is sent are the bytes that came, but for what is another word there."""

from __future__ import annotations

import io

import pytest

from gateway.delivery.overflow_endpoint import OverflowEndpoint
from gateway.protocol import body
from gateway.protocol.paths import ROUTES
from gateway.telemetry.log import Log
from policy.config.deployment import Price, Upstream
from policy.document.parse import parse
from tests.policy.example_documents import GOOD

CHAT = ROUTES["/v1/chat/completions"]


@pytest.mark.parametrize(
    ("came", "goes"),
    [
        (b'{ "model" : "m","seed":1e0}', b'{ "model" : "theirs","seed":1e0}'),
        (b'{"cache_salt":"s" , "model":"m"}', b'{ "model":"theirs"}'),
        (b'{"model":"m", "cache_salt" : "a\\"b,", "n":1}', b'{"model":"theirs",  "n":1}'),
        (b'{"model":"m","n":1 , "cache_sal\\u0074":null }', b'{"model":"theirs","n":1  }'),
        (
            b'{"cache_salt":"s","model":"m","stream":true}',
            b'{"stream_options":{"include_usage":true},"model":"theirs","stream":true}',
        ),
    ],
)
async def test_nothing_else_is_touched(came: bytes, goes: bytes) -> None:
    upstream = Upstream(
        name="u",
        url="http://127.0.0.1:9/v1",
        models={"m": "theirs"},
        price=Price(input=0.0, output=0.0),
        cost_cap_per_h=0.0,
    )
    endpoint = OverflowEndpoint(upstream, parse(GOOD), Log(0, io.StringIO()))
    sent = endpoint.outgoing(CHAT, "m", body.read(came), came)
    assert b"".join(sent.parts) == goes
    assert sent.size == len(goes)
    assert sent.counts == (b"stream" in came)
