"""A replay sends the requests of the trace in an open loop, and summarizes the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from policy.errors import Unreachable
from sim.arrivals import Arrival
from tests.tidegate.replay.endpoint import Endpoint
from tidegate.replay.endpoint_api import EndpointRefused, RequestFormat
from tidegate.replay.http_client import ReplayConnectionPool
from tidegate.replay.player import TracePlayer
from tidegate.replay.prompts import PromptGenerator
from tidegate.replay.replay_and_capture import ReplayResult, replay
from tidegate.replay.results import ReplayRow

PROBES = 2


async def play(
    endpoint: Endpoint, arrivals: Iterable[Arrival], record: Path | None = None, **more: Any
) -> tuple[ReplayResult, list[ReplayRow]]:
    rows: list[ReplayRow] = []
    pool, request_format = ReplayConnectionPool(endpoint.url), RequestFormat(**more)
    played = await replay(
        arrivals, pool, request_format, seed=1, in_flight=64, record=record, on_row=rows.append
    )
    return played, rows


@pytest.mark.slow
async def test_lengths_and_names_are_those_of_the_trace(endpoint: Endpoint, tmp_path: Path) -> None:
    trace = [
        Arrival(0.0, 700, 9, blocks=(5,)),
        Arrival(0.01, 40, 1, model="gpt-elsewhere", adapter="sql"),
        Arrival(0.5, 1500, 30, model="base", blocks=(5, 6)),
    ]
    played, rows = await play(endpoint, trace, tmp_path / "rows.jsonl")
    asked = endpoint.asked[PROBES:]
    assert {body["max_tokens"]: body["model"] for body in asked} == {9: "base", 1: "sql", 30: "base"}
    assert all(body["min_tokens"] == body["max_tokens"] for body in asked)
    assert all(body["stream"] and body["ignore_eos"] for body in asked)
    rows.sort(key=lambda row: row.at)
    assert [(row.input_tokens, row.output_tokens) for row in rows] == [(700, 9), (40, 1), (1500, 30)]
    assert [row.status for row in rows] == [200] * 3 and all(row.served for row in rows)
    assert [row.itl_s is None for row in rows] == [False, True, False]
    assert [row.adapter for row in rows] == ["", "sql", ""]
    assert rows[2].cached_tokens == 512  # the block that the first one had
    recorded = [
        msgspec.json.decode(line, type=ReplayRow)
        for line in (tmp_path / "rows.jsonl").read_bytes().splitlines()
    ]
    assert sorted(recorded, key=lambda row: row.at) == rows
    outcome = played.outcome
    assert (outcome.sent, outcome.served, outcome.cut, dict(outcome.failed)) == (3, 3, 0, {})
    assert (outcome.input_tokens, outcome.output_tokens) == (2240, 40)
    assert outcome.ttft_s is not None and outcome.ttft_s.p50 <= outcome.ttft_s.max


async def test_a_chat_has_the_length_of_the_trace_with_its_template(endpoint: Endpoint) -> None:
    played, rows = await play(endpoint, [Arrival(0.0, 400, 3)], chat=True)
    assert set(endpoint.paths) == {"/v1/chat/completions"}
    assert [row.input_tokens for row in rows] == [400]
    assert played.fit.overhead > 0


async def test_a_given_model_replaces_the_traces(endpoint: Endpoint) -> None:
    await play(endpoint, [Arrival(0.0, 40, 1, model="base"), Arrival(0.0, 40, 1)], model="sql")
    assert {body["model"] for body in endpoint.asked} == {"sql"}


async def test_without_ignore_eos_support_answers_have_the_models_length(endpoint: Endpoint) -> None:
    endpoint.strict = True
    played, rows = await play(endpoint, [Arrival(0.0, 40, 7)])
    assert not played.request_format.exact and rows[0].served
    assert "ignore_eos" not in endpoint.asked[-1] and endpoint.asked[-1]["max_tokens"] == 7


async def test_failures_are_counted_and_the_replay_continues(endpoint: Endpoint) -> None:
    trace = [Arrival(0.0, 30, 2, adapter="none"), Arrival(0.0, 25_000, 2), Arrival(0.01, 30, 2)]
    played, rows = await play(endpoint, trace)
    assert sorted(row.status for row in rows) == [200, 400, 404]
    assert dict(played.outcome.failed) == {400: 1, 404: 1} and played.outcome.served == 1
    failed = next(row for row in rows if row.status == 404)
    assert (failed.error, failed.adapter) == ("The model `none` does not exist.", "none")
    assert failed.ttft_s is None and failed.output_tokens == 2  # those that were requested
    assert played.outcome.output_tokens == 2  # of the one that was served


async def test_unserved_models_and_unreachable_endpoints_are_errors(endpoint: Endpoint) -> None:
    with pytest.raises(EndpointRefused, match=r"answered 404: The model `none` does not exist"):
        await play(endpoint, [Arrival(0.0, 30, 2)], model="none")
    endpoint.url = "http://127.0.0.1:9"
    with pytest.raises(Unreachable, match="does not answer"):
        await play(endpoint, [Arrival(0.0, 30, 2)])


class WaitingServer:
    """A server that answers when ``wanted`` requests have arrived, or without ``answers`` never."""

    def __init__(self, wanted: int, *, answers: bool = True) -> None:
        self.here = self.most = 0
        self.full = asyncio.Event()
        self._wanted = wanted
        self.answered = self.full if answers else asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.partition(b"content-length: ")[2].split(b"\r\n")[0]))
        self.here += 1
        self.most = max(self.most, self.here)
        if self.here == self._wanted:
            self.full.set()
        await self.answered.wait()
        self.here -= 1
        body = b'data: {"choices": [{"finish_reason": "stop"}]}\n\n'
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        writer.close()

    def release(self) -> None:
        self.answered.set()


async def play_against(waiting: WaitingServer, requests: int, in_flight: int) -> tuple[TracePlayer, int]:
    rows: list[ReplayRow] = []
    async with await asyncio.start_server(waiting.serve, "127.0.0.1", 0) as server:
        pool = ReplayConnectionPool(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        player = TracePlayer(
            pool, RequestFormat("m"), PromptGenerator(1), in_flight=in_flight, on_row=rows.append
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(player.play(Arrival(0.0, 9, 1) for _ in range(requests)))
            await waiting.full.wait()
            if not waiting.answered.is_set():
                player.stop()
        waiting.release()
        pool.close()
    return player, len(rows)


async def test_requests_are_sent_before_earlier_ones_are_answered() -> None:
    waiting = WaitingServer(wanted=40)
    _, reported = await play_against(waiting, 40, in_flight=64)
    assert reported == waiting.most == 40


async def test_in_flight_requests_are_limited() -> None:
    waiting = WaitingServer(wanted=8)
    _, reported = await play_against(waiting, 24, in_flight=8)
    assert (reported, waiting.most) == (24, 8)


async def test_stop_cancels_and_counts_open_requests() -> None:
    player, reported = await play_against(WaitingServer(wanted=8, answers=False), 24, in_flight=8)
    assert (reported, player.cut) == (0, 8)


async def test_a_record_that_cannot_be_written_ends_the_replay() -> None:
    def full(_: ReplayRow) -> None:
        raise OSError("no space left")

    waiting = WaitingServer(wanted=1)
    async with await asyncio.start_server(waiting.serve, "127.0.0.1", 0) as server:
        pool = ReplayConnectionPool(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        player = TracePlayer(pool, RequestFormat("m"), PromptGenerator(1), in_flight=8, on_row=full)
        with pytest.raises(OSError, match="no space left"):
            await player.play([Arrival(0.0, 9, 1)])
        pool.close()
