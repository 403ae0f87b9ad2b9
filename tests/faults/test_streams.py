"""Rows 6 to 17: faults of a replica within an answer, and what the client receives.

Row 14 for every way of cutting a stream: ``tests/gateway/protocol/test_events.py``.
"""

from __future__ import annotations

import asyncio

import psutil
import pytest

from tests.faults import faults
from tests.faults.faults import tokens
from tests.faults.harness import Harness
from tests.gateway.fake_replica import DONE, Answer, event, stream

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]
FIRST_S = 2.5
GAP_S = 2.0
# The delay of polling beyond a deadline.
SLACK_S = 1.5
FINISH = event(finish="stop")
WHOLE = tokens(3) + FINISH + DONE
GATEWAY = {
    "first_token_timeout_s": FIRST_S,
    "inter_token_timeout_s": GAP_S,
    "answer_timeout_s": 2 * FIRST_S,
    "queue_timeout_s": 10,
}


async def test_6_a_stream_without_a_first_event_is_retried_elsewhere(harness: Harness, model: str) -> None:
    bad, good = await harness.fleet(model, 2)
    bad.usual = faults.stalling()
    await harness.prefer(bad)
    async with harness.expect(model, {"ok": 1}, attempts=2) as after:
        reply = await harness.ask(model, stream=True)
    assert reply.headers["x-tidegate-replica"] == good.id
    (left,) = bad.aborted
    assert left.left_at is not None
    stalls_s = after.stalls.seconds
    assert FIRST_S * 0.9 - stalls_s <= left.left_at - left.at <= FIRST_S + SLACK_S + stalls_s
    assert good.log[0].at >= left.at + FIRST_S * 0.9 - stalls_s


async def test_6_a_whole_answer_without_headers_ends_at_its_deadline(harness: Harness, model: str) -> None:
    bad, good = await harness.fleet(model, 2)
    bad.usual = faults.silent
    await harness.prefer(bad)
    async with harness.expect(model, {"ok": 1}, attempts=2):
        reply = await harness.ask(model)
    assert reply.headers["x-tidegate-replica"] == good.id
    assert len(bad.aborted) == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_7_a_stalled_stream_ends_at_the_gap_deadline(harness: Harness, model: str, path: str) -> None:
    (bad,) = await harness.fleet(model, 1, usual=faults.stalling(tokens(3)))
    async with harness.expect(model, {"stream_broken": 1}, attempts=1) as after:
        reply = await harness.ask(model, path=path, stream=True)
    assert reply.body.startswith(tokens(3))
    assert reply.error is not None
    (left,) = bad.aborted
    assert left.left_at is not None
    took_s, stalls_s = left.left_at - reply.arrivals[0][0], after.stalls.seconds
    assert GAP_S * 0.9 - stalls_s <= took_s <= GAP_S + SLACK_S + stalls_s


ERROR = (
    b'data: {"error": {"message": "the engine is unwell", "type": "InternalServerError", "code": 500}}\n\n'
)
HALF = b'data: {"id":"c","choices":[{"index":0,"delta":{"con\n\n'
NOT_UTF8 = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"\xff\xfe"},"finish_reason":null}]}\n\n'
NOT_A_NUMBER = (
    b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"a"},'
    b'"logprobs":{"content":[{"token":"a","logprob":NaN}]},"finish_reason":null}]}\n\n'
)
TEXT = b"data: Internal Server Error\n\n"


def sent(data: bytes) -> Answer:
    return faults.reply(data, content_type=faults.EVENTS)


@pytest.mark.parametrize(
    ("answer", "expected", "lost"),
    [
        pytest.param(faults.breaking(tokens(3), reset=False), "stream_broken", b"", id="8 FIN"),
        pytest.param(faults.breaking(tokens(3), reset=True), "stream_broken", b"", id="9 RST"),
        pytest.param(sent(tokens(3)), "stream_broken", b"", id="10 a clean end without a finish reason"),
        pytest.param(sent(tokens(3) + FINISH[:20]), "stream_broken", b"", id="10 half an event"),
        pytest.param(sent(tokens(3) + DONE), "stream_broken", DONE, id="11 done without a finish reason"),
        pytest.param(sent(tokens(3) + ERROR + DONE), "the engine is unwell", DONE, id="12 an error, done"),
        pytest.param(sent(tokens(3) + HALF + FINISH + DONE), "stream_broken", HALF, id="13 half JSON"),
        pytest.param(sent(tokens(3) + NOT_UTF8 + FINISH + DONE), "stream_broken", NOT_UTF8, id="13 no UTF-8"),
        pytest.param(
            sent(tokens(3) + NOT_A_NUMBER + FINISH + DONE), "stream_broken", NOT_A_NUMBER, id="13 NaN"
        ),
        pytest.param(sent(tokens(3) + TEXT + FINISH + DONE), "stream_broken", TEXT, id="13 no JSON"),
    ],
)
async def test_8_13_a_stream_that_breaks_ends_in_one_error(
    harness: Harness, model: str, answer: Answer, expected: str, lost: bytes
) -> None:
    """Complete events are delivered, ``lost`` is not, and a started stream is not retried."""
    one, other = await harness.fleet(model, 2, usual=answer)
    async with harness.expect(model, {"stream_broken": 1}, attempts=1):
        reply = await harness.ask(model, stream=True)
    assert reply.body.startswith(tokens(3))
    assert not lost or lost not in reply.body
    assert reply.error is not None
    assert expected in (reply.error["code"], reply.error["message"])
    assert len(one.log) + len(other.log) == 1


async def test_12_an_error_event_before_any_token_is_retried_elsewhere(harness: Harness, model: str) -> None:
    bad, good = await harness.fleet(model, 2)
    bad.usual = sent(ERROR + DONE)
    await harness.prefer(bad)
    async with harness.expect(model, {"ok": 1}, attempts=2):
        reply = await harness.ask(model, stream=True)
    assert reply.headers["x-tidegate-replica"] == good.id


@pytest.mark.parametrize("body", [b'{"choices": [', b'{"a": "\xff"}', b'{"logprob": NaN}', b"", b"nothing"])
async def test_13_a_whole_answer_of_invalid_json_is_502(harness: Harness, model: str, body: bytes) -> None:
    await harness.fleet(model, 2, usual=faults.reply(body))
    async with harness.expect(model, {"upstream_failed": 1}, attempts=2):
        reply = await harness.ask(model)
    assert reply.status == 502


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"], ids=["LF", "CRLF"])
async def test_14_events_split_at_every_byte_stay_whole(harness: Harness, model: str, newline: bytes) -> None:
    data = (b": alive\n\n" + WHOLE).replace(b"\n", newline)
    (one,) = await harness.fleet(model, 1)
    one.usual = stream(data, piece=1)
    async with harness.expect(model, {"ok": 2}, attempts=2):
        assert (await harness.ask(model, stream=True)).body == data
        one.usual = stream(data)
        assert (await harness.ask(model, stream=True)).body == data


async def test_15_data_after_done_is_cut(harness: Harness, model: str) -> None:
    await harness.fleet(model, 1, usual=sent(WHOLE + tokens(5)))
    async with harness.expect(model, {"ok": 1}, attempts=1):
        assert (await harness.ask(model, stream=True)).body == WHOLE


async def test_15_an_endless_line_ends_the_stream_in_bounded_memory(harness: Harness, model: str) -> None:
    size = 100 * 1024 * 1024
    (bad,) = await harness.fleet(model, 1, usual=faults.flooding(b"x" * 65536, size))
    process = psutil.Process(harness.workers[0].pid)
    before = process.memory_info().rss
    most = before

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, process.memory_info().rss)
            await asyncio.sleep(0.01)

    watching = asyncio.create_task(watch())
    async with harness.expect(model, None, attempts=1) as after:
        reply = await harness.ask(model, stream=True)
    watching.cancel()
    assert "ok" not in await after.outcomes()
    assert reply.error is not None
    assert len(bad.aborted) == 1
    assert most - before < 40 * 1024 * 1024


async def test_16_comments_extend_the_deadline_of_a_prefill(harness: Harness, model: str) -> None:
    gap_s, comments = FIRST_S / 8, 12
    await harness.fleet(model, 1, usual=faults.kept_alive(comments, gap_s))
    async with harness.expect(model, {"ok": 1}, attempts=1):
        reply = await harness.ask(model, stream=True)
    prefill_s = comments * gap_s
    assert reply.took_s >= prefill_s
    assert reply.body.count(b": keep-alive") == comments
    ((_, ttft_s),) = await harness.samples("tidegate_ttft_seconds_sum", model=model)
    assert prefill_s <= ttft_s <= reply.took_s


@pytest.mark.long
@pytest.mark.timeout(400)
async def test_16_a_prefill_of_five_minutes_is_served(tmp_path_factory: pytest.TempPathFactory) -> None:
    harness = Harness(tmp_path_factory.mktemp("long"))
    await harness.start_controller()
    await harness.start_worker()
    model = harness.fresh_model()
    await harness.fleet(model, 1, usual=faults.kept_alive(31, 10.0))
    async with harness.expect(model, {"ok": 1}, attempts=1):
        reply = await harness.ask(model, stream=True)
    assert reply.took_s >= 300
    await harness.close()


WRONG = {
    "type": faults.reply(b"<html>no</html>", content_type="text/html"),
    "204": faults.reply(b"", code=204),
    "gzip": faults.reply(b"\x1f\x8b\x08", content_encoding="gzip"),
    "gzip stream": faults.reply(b"\x1f\x8b\x08", content_type=faults.EVENTS, content_encoding="gzip"),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_17_a_response_of_wrong_type_is_502(harness: Harness, model: str, kind: str, path: str) -> None:
    await harness.fleet(model, 2, usual=WRONG[kind])
    async with harness.expect(model, {"upstream_failed": 1}, attempts=2):
        reply = await harness.ask(model, path=path, stream=kind == "gzip stream")
    assert reply.status == 502
