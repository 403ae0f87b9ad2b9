"""What a client receives does not depend on how its request went to the replica: by frames or by HTTP."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.faults import faults
from tests.gateway.fake_replica import ANSWER, DONE, STREAM, Answer, Exchange, FrameExchange, event, stream
from tests.gateway.worker import Stack

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def way() -> str:
    """A gateway that goes by frames to the replicas that speak them."""
    return "frames"


FINISH = event(finish="stop")
LONG = b"".join(event(f"\N{SNOWMAN} {number} " * 9) for number in range(2000)) + FINISH + DONE
ERROR = b'data: {"error": {"message": "no more", "code": 500}}\n\n'


async def at_once(exchange: Exchange) -> None:
    await exchange.reply(STREAM, content_type="text/event-stream")


ANSWERS: dict[str, tuple[Answer, dict[str, Any]]] = {
    "whole": (faults.reply(), {}),
    "whole, empty": (faults.reply(b""), {}),
    "whole, large": (faults.reply(json.dumps({"choices": ["x" * 3_000_000]}).encode()), {}),
    "whole, no JSON": (faults.reply(ANSWER[:-1]), {}),
    "whole, another type": (faults.reply(b"<p>", content_type="text/html"), {}),
    "rejected": (faults.status(400, "temperature must be at most 2"), {}),
    "limited": (faults.status(429, "slow down", retry_after="7"), {}),
    "failed": (faults.status(500), {}),
    "stream": (stream(STREAM), {"stream": True}),
    "stream at once": (at_once, {"stream": True}),
    "stream byte by byte": (stream(b": hi\n\n" + STREAM, piece=1), {"stream": True}),
    "stream with CRLF": (stream(STREAM.replace(b"\n", b"\r\n"), piece=7), {"stream": True}),
    "stream beyond its window": (stream(LONG, piece=100_000), {"stream": True}),
    "stream of comments": (stream(b": hi\n\n" * 3), {"stream": True}),
    "stream without an end": (stream(STREAM[: -len(DONE)]), {"stream": True}),
    "stream without a finish": (stream(event("a") + DONE), {"stream": True}),
    "stream that fails": (stream(event("a") + ERROR + DONE), {"stream": True}),
    "stream that fails at once": (stream(ERROR + DONE), {"stream": True}),
    "stream with more after its end": (stream(STREAM + STREAM), {"stream": True}),
    "stream that was rejected": (faults.status(400, "no"), {"stream": True}),
    "stream of JSON": (faults.reply(), {"stream": True}),
    "closed": (faults.breaking(event("a") + event("b"), reset=False), {"stream": True}),
    "reset": (faults.breaking(event("a") + event("b"), reset=True), {"stream": True}),
    "broken in an event": (faults.breaking(event("a") + event("b")[:20], reset=False), {"stream": True}),
}


async def received(stack: Stack, way: str) -> dict[str, tuple[int, dict[str, str], bytes]]:
    """Status, headers and body of each answer."""
    replica = await stack.serve(way, frames=way == "frames")
    found = {}
    for name, (answer, more) in ANSWERS.items():
        replica.answer = answer
        await stack.ready(replica)
        got = await stack.chat(**more)
        assert isinstance(replica.hits[-1], FrameExchange) is (way == "frames")
        own = {"date", "x-request-id", "x-tidegate-replica"}
        headers = {key: value for key, value in got.headers.items() if key not in own}
        found[name] = (got.status_code, headers, got.content)
    return found


async def test_a_client_receives_the_same_bytes_by_frames_and_by_http(shared: Stack) -> None:
    by_frames, by_http = await received(shared, "frames"), await received(shared, "http")
    for name, expected in by_http.items():
        assert by_frames[name] == expected, name
