"""Rows 6 to 17: what a replica may do to a stream, and what its client gets of it."""

from __future__ import annotations

import asyncio
import itertools

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.protocol.sse import ChatTail
from tests.faults import faults
from tests.faults.faults import tokens
from tests.faults.raw_client import Reply
from tests.faults.stand import Stand
from tests.gateway.fake_replica import DONE, event, stream

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]
FIRST_S = 2.5
GAP_S = 2.0
# What polling may add to any deadline.
SLACK_S = 1.5
FINISH = event(finish="stop")
WHOLE = tokens(3) + FINISH + DONE
GATEWAY = {
    "first_token_timeout_s": FIRST_S,
    "inter_token_timeout_s": GAP_S,
    "answer_timeout_s": FIRST_S,
    "queue_timeout_s": 10,
}


def code_of(reply: Reply) -> str | None:
    assert reply.error is not None
    code = reply.error["code"]
    assert code is None or isinstance(code, str)
    return code


async def test_6_headers_then_silence(stand: Stand, model: str) -> None:
    bad, good = await stand.fleet(model, 2)
    bad.usual = faults.stalling()
    await stand.prefer(bad)
    async with stand.aftermath(model, {"ok": 1}, attempts=2) as after:
        reply = await stand.ask(model, stream=True)
    assert reply.headers["x-tidegate-replica"] == good.id
    (left,) = bad.aborted
    assert left.left_at is not None
    stalls_s = after.stalls.seconds
    assert FIRST_S * 0.9 - stalls_s <= left.left_at - left.at <= FIRST_S + SLACK_S + stalls_s
    assert good.log[0].at >= left.at + FIRST_S * 0.9 - stalls_s


async def test_6_no_headers_at_all_of_an_answer_that_is_no_stream(stand: Stand, model: str) -> None:
    bad, good = await stand.fleet(model, 2)
    bad.usual = faults.silent
    await stand.prefer(bad)
    async with stand.aftermath(model, {"ok": 1}, attempts=2):
        reply = await stand.ask(model)
    assert reply.headers["x-tidegate-replica"] == good.id
    assert len(bad.aborted) == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_7_a_stall_after_some_tokens(stand: Stand, model: str, path: str) -> None:
    (bad,) = await stand.fleet(model, 1, usual=faults.stalling(tokens(3)))
    async with stand.aftermath(model, {"stream_broken": 1}, attempts=1) as after:
        reply = await stand.ask(model, path=path, stream=True)
    assert reply.body.startswith(tokens(3))
    assert reply.error is not None
    (left,) = bad.aborted
    assert left.left_at is not None
    took_s, stalls_s = left.left_at - reply.arrivals[0][0], after.stalls.seconds
    assert GAP_S * 0.9 - stalls_s <= took_s <= GAP_S + SLACK_S + stalls_s


@pytest.mark.parametrize("reset", [False, True], ids=["FIN", "RST"])
async def test_8_9_a_connection_that_ends_under_a_stream(stand: Stand, model: str, reset: bool) -> None:
    one, other = await stand.fleet(model, 2, usual=faults.breaking(tokens(3), reset=reset))
    async with stand.aftermath(model, {"stream_broken": 1}, attempts=1):
        reply = await stand.ask(model, stream=True)
    assert reply.body.startswith(tokens(3))
    assert code_of(reply) == "stream_broken"
    assert len(one.log) + len(other.log) == 1  # what was begun is never begun again


@pytest.mark.parametrize("done", [b"", DONE], ids=["clean end", "done"])
async def test_10_11_an_end_without_a_finish_reason(stand: Stand, model: str, done: bytes) -> None:
    await stand.fleet(model, 1, usual=faults.reply(tokens(3) + done, content_type=faults.EVENTS))
    async with stand.aftermath(model, {"stream_broken": 1}, attempts=1):
        reply = await stand.ask(model, stream=True)
    assert reply.body.startswith(tokens(3))
    assert code_of(reply) == "stream_broken"


ERROR = (
    b'data: {"error": {"message": "the engine is unwell", "type": "InternalServerError", "code": 500}}\n\n'
)


async def test_12_an_error_event_then_done(stand: Stand, model: str) -> None:
    await stand.fleet(model, 1, usual=faults.reply(tokens(3) + ERROR + DONE, content_type=faults.EVENTS))
    async with stand.aftermath(model, {"stream_broken": 1}, attempts=1):
        reply = await stand.ask(model, stream=True)
    assert reply.body.startswith(tokens(3))
    assert reply.error is not None
    assert reply.error["message"] == "the engine is unwell"


async def test_12_an_error_event_first_is_tried_elsewhere(stand: Stand, model: str) -> None:
    bad, good = await stand.fleet(model, 2)
    bad.usual = faults.reply(ERROR + DONE, content_type=faults.EVENTS)
    await stand.prefer(bad)
    async with stand.aftermath(model, {"ok": 1}, attempts=2):
        reply = await stand.ask(model, stream=True)
    assert reply.headers["x-tidegate-replica"] == good.id


BROKEN = {
    "half": b'data: {"id":"c","choices":[{"index":0,"delta":{"con\n\n',
    "bytes": b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"\xff\xfe"},'
    b'"finish_reason":null}]}\n\n',
    "nan": b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"a"},'
    b'"logprobs":{"content":[{"token":"a","logprob":NaN}]},"finish_reason":null}]}\n\n',
    "text": b"data: Internal Server Error\n\n",
}


@pytest.mark.parametrize("kind", BROKEN)
async def test_13_broken_json_in_a_stream(stand: Stand, model: str, kind: str) -> None:
    body = tokens(3) + BROKEN[kind] + FINISH + DONE
    await stand.fleet(model, 1, usual=faults.reply(body, content_type=faults.EVENTS))
    async with stand.aftermath(model, {"stream_broken": 1}, attempts=1):
        reply = await stand.ask(model, stream=True)
    assert reply.body.startswith(tokens(3))
    assert code_of(reply) == "stream_broken"
    assert BROKEN[kind] not in reply.body


@pytest.mark.parametrize("body", [b'{"choices": [', b'{"a": "\xff"}', b'{"logprob": NaN}', b"", b"nothing"])
async def test_13_broken_json_of_a_whole_answer(stand: Stand, model: str, body: bytes) -> None:
    await stand.fleet(model, 2, usual=faults.reply(body))
    async with stand.aftermath(model, {"upstream_failed": 1}, attempts=2):
        reply = await stand.ask(model)
    assert reply.status == 502


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    """``data`` cut at each of ``cuts``, modulo its length."""
    edges = sorted({0, len(data), *(cut % len(data) for cut in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@given(
    st.lists(st.sampled_from([event("é"), event('is "finish_reason":"stop" [DONE]'), b": alive\n\n"])),
    st.lists(st.integers(min_value=0), max_size=20),
    st.sampled_from([b"\n", b"\r\n"]),
)
async def test_14_events_split_anywhere(parts: list[bytes], cuts: list[int], newline: bytes) -> None:
    data = (b"".join(parts) + FINISH + DONE).replace(b"\n", newline)
    tail = ChatTail(1)
    assert b"".join(tail.feed(piece) for piece in pieces_of(data, cuts)) == data
    assert tail.end(clean=True) is None
    assert tail.finished
    assert not tail.failed


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"], ids=["LF", "CRLF"])
async def test_14_events_split_at_every_byte(stand: Stand, model: str, newline: bytes) -> None:
    data = (b": alive\n\n" + WHOLE).replace(b"\n", newline)
    (one,) = await stand.fleet(model, 1)
    one.usual = stream(data, piece=1)
    async with stand.aftermath(model, {"ok": 2}, attempts=2):
        assert (await stand.ask(model, stream=True)).body == data
        one.usual = stream(data)
        assert (await stand.ask(model, stream=True)).body == data


async def test_15_data_after_done_is_cut(stand: Stand, model: str) -> None:
    await stand.fleet(model, 1, usual=faults.reply(WHOLE + tokens(5), content_type=faults.EVENTS))
    async with stand.aftermath(model, {"ok": 1}, attempts=1):
        assert (await stand.ask(model, stream=True)).body == WHOLE


async def test_15_a_line_without_an_end(stand: Stand, model: str) -> None:
    size = 100 * 1024 * 1024
    (bad,) = await stand.fleet(model, 1, usual=faults.flooding(b"x" * 65536, size))
    process = psutil.Process(stand.workers[0].pid)
    before = process.memory_info().rss
    most = before

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, process.memory_info().rss)
            await asyncio.sleep(0.01)

    watching = asyncio.create_task(watch())
    async with stand.aftermath(model, None, attempts=1) as after:
        reply = await stand.ask(model, stream=True)
    watching.cancel()
    assert "ok" not in await after.outcomes()
    assert reply.error is not None
    assert len(bad.aborted) == 1
    assert most - before < 40 * 1024 * 1024


async def test_16_comments_keep_a_prefill_alive(stand: Stand, model: str) -> None:
    """Longer than the deadline of silence, and never silent."""
    gap_s, comments = FIRST_S / 8, 12
    await stand.fleet(model, 1, usual=faults.kept_alive(comments, gap_s))
    async with stand.aftermath(model, {"ok": 1}, attempts=1):
        reply = await stand.ask(model, stream=True)
    prefill_s = comments * gap_s
    assert reply.took_s >= prefill_s
    assert reply.body.count(b": keep-alive") == comments
    ((_, ttft_s),) = await stand.samples("tidegate_ttft_seconds_sum", model=model)
    assert prefill_s <= ttft_s <= reply.took_s


@pytest.mark.long
@pytest.mark.timeout(400)
async def test_16_a_prefill_of_five_minutes(tmp_path_factory: pytest.TempPathFactory) -> None:
    stand = Stand(tmp_path_factory.mktemp("long"))
    await stand.start_controller()
    await stand.start_worker()
    model = stand.fresh_model()
    await stand.fleet(model, 1, usual=faults.kept_alive(31, 10.0))
    async with stand.aftermath(model, {"ok": 1}, attempts=1):
        reply = await stand.ask(model, stream=True)
    assert reply.took_s >= 300
    await stand.close()


WRONG = {
    "type": faults.reply(b"<html>no</html>", content_type="text/html"),
    "204": faults.reply(b"", code=204),
    "gzip": faults.reply(b"\x1f\x8b\x08", content_encoding="gzip"),
    "gzip stream": faults.reply(b"\x1f\x8b\x08", content_type=faults.EVENTS, content_encoding="gzip"),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_17_not_an_answer(stand: Stand, model: str, kind: str, path: str) -> None:
    await stand.fleet(model, 2, usual=WRONG[kind])
    async with stand.aftermath(model, {"upstream_failed": 1}, attempts=2):
        reply = await stand.ask(model, path=path, stream=kind == "gzip stream")
    assert reply.status == 502
