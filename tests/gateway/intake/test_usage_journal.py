"""What each kind of answer is charged, as the worker records it; and a disk without room."""

from __future__ import annotations

import errno
import json
import os
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from gateway.intake import usage_journal
from gateway.intake.usage_journal import UsageCharge, UsageJournal
from gateway.protocol.usage import TokenUsage
from gateway.telemetry.structured_log import StructuredLog
from policy.tenancy.price import FREE
from policy.tenancy.usage_slot import UsageRecord
from policy.wire.headers import CANARY_HEADER
from store.key_derivation import own_key
from store.usage_segments import SegmentReader
from tests.gateway.fake_replica import DONE, SECRET, Answer, Exchange, event, forever, stream
from tests.gateway.worker import Stack, until

CHAT = {"model": "alpha", "messages": [{"role": "user", "content": "How much is the fish?"}]}


def message_stream(output: int, *, end: bool) -> bytes:
    """Anthropic's events of so many deltas, with usage in the first and the last but one."""
    usage = {"input_tokens": 11, "output_tokens": 1}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": {"usage": usage}}]
    events += [{"type": "content_block_delta", "delta": {"text": "x"}} for _ in range(output)]
    if end:
        events.append({"type": "message_delta", "usage": {"output_tokens": output}})
        events.append({"type": "message_stop"})
    return b"".join(b"event: x\ndata: " + json.dumps(each).encode() + b"\n\n" for each in events)


def whole(usage: dict[str, Any] | None) -> Answer:
    async def answer(exchange: Exchange) -> None:
        await exchange.reply(json.dumps({"id": "1", "choices": [], "usage": usage}).encode())

    return answer


def refused(status: int) -> Answer:
    async def answer(exchange: Exchange) -> None:
        await exchange.reply(b'{"error": {"message": "no", "type": "x"}}', status=status)

    return answer


class Recorded:
    """The records of a stack's workers."""

    def __init__(self, stack: Stack) -> None:
        self._folder = stack.root / "usage"
        self._before = self.count()

    def _all(self) -> list[UsageRecord]:
        readers = [SegmentReader(path) for path in self._folder.glob("*.usage")]
        try:
            return [record for reader in readers for _, record in reader.final(10_000)]
        finally:
            for reader in readers:
                reader.close()

    def count(self) -> int:
        return len(self._all())

    def new(self) -> list[tuple[int, int, int, bool]]:
        """Prompt, cached and output tokens, and whether they are estimated, since this was made."""
        return [(r.prompt, r.cached, r.output, r.estimated) for r in self._all()[self._before :]]


def counts(prompt: int, output: int, cached: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


LAST = event("a") + event(finish="stop")
COUNTED = b'data: {"choices":[],"usage":{"prompt_tokens":12,"completion_tokens":2}}\n\n'


@pytest.mark.process
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("answer", "path", "streamed", "expected"),
    [
        (whole(counts(12, 3, 4)), "chat/completions", False, (12, 4, 3, False)),
        (whole(None), "chat/completions", False, (None, 0, None, True)),
        (whole(counts(10**7, 3)), "chat/completions", False, (None, 0, None, True)),
        (stream(LAST + COUNTED + DONE), "chat/completions", True, (12, 0, 2, False)),
        (stream(LAST + DONE), "chat/completions", True, (None, 0, 2, True)),
        (stream(event("a") + event("b")), "chat/completions", True, (None, 0, 2, True)),
        (stream(message_stream(5, end=True)), "messages", True, (11, 0, 5, False)),
        (stream(message_stream(5, end=False)), "messages", True, (11, 0, 6, True)),
        (refused(400), "chat/completions", False, None),
        (refused(400), "chat/completions", True, None),
        (whole(counts(12, 3)), "tokenize", False, None),
    ],
)
async def test_what_is_charged(
    shared: Stack, answer: Answer, path: str, streamed: bool, expected: tuple[Any, ...] | None
) -> None:
    replica = shared.replicas[0] if shared.replicas else await shared.serve("one")
    replica.answer, recorded = answer, Recorded(shared)
    body = {**CHAT, "prompt": "x", "max_tokens": 9, "stream": streamed}
    await shared.http.post(f"/v1/{path}", json=body)
    if expected is None:
        assert recorded.new() == []
        return
    (found,) = recorded.new()
    assert all(a == b for a, b in zip(found, expected, strict=True) if b is not None), found
    assert 0 < found[0] < 50, "the prompt is estimated"


@pytest.mark.process
@pytest.mark.asyncio(loop_scope="module")
async def test_a_client_that_leaves_is_charged_what_was_relayed(shared: Stack) -> None:
    replica = shared.replicas[0] if shared.replicas else await shared.serve("one")
    replica.answer, recorded = forever, Recorded(shared)
    async with shared.http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
        async for _ in answer.aiter_raw():
            break
    await until(lambda: bool(recorded.new()), "it is charged")
    ((prompt, cached, output, estimated),) = recorded.new()
    assert (prompt > 0, cached, output, estimated) == (True, 0, 1, True)


@pytest.mark.process
@pytest.mark.asyncio(loop_scope="module")
async def test_a_canary_is_charged_nothing(shared: Stack) -> None:
    shared.replicas[0].answer, recorded = whole(counts(12, 3)), Recorded(shared)
    own = {CANARY_HEADER: "1", "authorization": f"Bearer {own_key(SECRET)}"}
    assert (await shared.http.post("/v1/chat/completions", json=CHAT, headers=own)).status_code == 200
    assert recorded.new() == []


def test_without_room_requests_are_served_unrecorded_until_there_is_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged = StringIO()
    journal = UsageJournal(tmp_path / "usage", StructuredLog(0, logged))
    clock = [1000.0]
    monkeypatch.setattr(usage_journal, "time", lambda: clock[0])

    def serve() -> UsageCharge:
        charge = UsageCharge(journal, "t", "k", "m", "", FREE, 7)
        charge.begin()
        charge.relay(1)
        charge.end(TokenUsage(5, 0, 2))
        return charge

    with monkeypatch.context() as full:

        def no_room(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        full.setattr(os, "posix_fallocate", no_room)
        assert [(charge.prompt, charge.output) for charge in (serve(), serve())] == [(5, 2), (5, 2)]
        assert journal.unrecorded == 2
        assert logged.getvalue().count("usage_unrecorded") == 1
        assert list((tmp_path / "usage").iterdir()) == []
    clock[0] += 2 * usage_journal.RETRY_S
    serve()
    (path,) = (tmp_path / "usage").iterdir()
    assert path.stat().st_blocks * 512 >= path.stat().st_size, "no later write needs room"
    assert journal.unrecorded == 2
    reader = SegmentReader(path)
    assert len(reader.final(9)) == 1
    reader.look()
    assert not reader.abandoned, "its worker lives"
    reader.close()
    journal.close()
