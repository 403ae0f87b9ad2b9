"""The reads of a turn of the event loop share its time, and what is beyond it waits for its own turn."""

from __future__ import annotations

import asyncio
import itertools
from functools import partial
from typing import cast

import pytest

from gateway.http import read_turns as module
from gateway.http.read_turns import (
    LATE_BYTES,
    MOST_CLOSED,
    MOST_LATE,
    MOST_RESUMED,
    MOST_STARTED,
    READ_BYTES,
    SMALL_BYTES,
    SMALL_STARTS_S,
    STARTS_S,
    TURN_S,
    ClientQueues,
    PacedReader,
    ReadTurns,
    RequestStarts,
)

COST_S = TURN_S / 5


class Wire:
    """A transport with ``size`` bytes to read; each process of a read takes :data:`COST_S`."""

    def __init__(self, site: Site, size: int, client: str = "a") -> None:
        self._site = site
        self.left = size
        self.got: list[int] = []
        self.reading = True
        self.pauses = 0
        self.aborted = self.closed = False
        self.reader = PacedReader(cast("asyncio.Transport", self), self.take, client)

    def take(self, data: bytes) -> None:
        self._site.now += COST_S
        self._site.order.append(self)
        self.got.append(len(data))

    def is_closing(self) -> bool:
        return self.aborted

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False
        self.pauses += 1

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None:
        self.closed = True

    def poll(self) -> None:
        """What a turn of the event loop does with data."""
        if self.reading and self.left:
            size = min(self.left, len(self.reader.buffer(READ_BYTES)))
            self.left -= size
            self.reader.updated(size)


class Site:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.order: list[Wire] = []
        self.turns = ReadTurns(lambda: self.now)
        monkeypatch.setattr(module, "read_turns", lambda: self.turns)

    async def turn(self, wires: list[Wire]) -> float:
        """One turn; returns how long reads took in it."""
        before = self.now
        await asyncio.sleep(0)
        for wire in wires:
            wire.poll()
        return self.now - before


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(monkeypatch)


async def test_hundreds_that_have_data_at_once_are_served_in_many_turns(site: Site) -> None:
    wires = [Wire(site, 100) for _ in range(300)]
    longest_s = max([await site.turn(wires) for _ in range(200)])
    assert longest_s <= 1.5 * TURN_S + 2 * COST_S
    # Of those that wait, the oldest and the newest in turns.
    assert site.order[:3] == wires[:3] and set(site.order) == {*wires}
    assert wires[-1] in site.order[:9] and site.order.index(wires[60]) < 180
    # A pause costs as much as a read.
    assert all(wire.got == [100] and wire.reading and not wire.pauses for wire in wires)


async def test_long_ones_are_read_on_a_few_at_a_time(site: Site) -> None:
    wires = [Wire(site, 3 * READ_BYTES) for _ in range(40)]
    for turn in itertools.count():
        assert await site.turn(wires) <= 1.5 * TURN_S + 2 * COST_S
        assert turn == 0 or sum(wire.reading and wire.left > 0 for wire in wires) <= MOST_RESUMED
        if not any(wire.left for wire in wires):
            break
    for _ in range(40):
        await site.turn(wires)
    assert all(sum(wire.got) == 3 * READ_BYTES and wire.reading for wire in wires)
    # What comes when the time is spent is read in small parts.
    assert {LATE_BYTES, READ_BYTES} <= {part for wire in wires for part in wire.got}


async def test_a_protocols_pause_outlasts_the_rest_of_its_connection(site: Site) -> None:
    one = Wire(site, 2 * READ_BYTES)
    await site.turn([one])
    assert not one.reading
    one.reader.pause()
    await site.turn([one])
    await site.turn([one])
    assert not one.reading
    one.reader.resume()
    assert one.reading
    await site.turn([one])
    assert not one.left


async def test_a_lost_connection_gets_what_was_read_and_then_nothing(site: Site) -> None:
    others, late = [Wire(site, 10) for _ in range(7)], Wire(site, 20)
    await site.turn([*others, late])
    assert not late.got
    late.reader.close()
    assert late.got == [20]
    late.reader.updated(5)
    await site.turn([late])
    assert late.got == [20]


async def test_an_error_of_one_connection_ends_that_one_only(site: Site) -> None:
    others, broken, after = [Wire(site, 10) for _ in range(5)], Wire(site, 20), Wire(site, 30)
    broken.take = lambda data: 1 // 0  # type: ignore[method-assign, assignment, return-value]
    broken.reader = PacedReader(cast("asyncio.Transport", broken), broken.take)
    raised: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context["exception"]))
    wires = [*others, broken, after]
    for _ in range(4):
        await site.turn(wires)
    assert [type(error) for error in raised] == [ZeroDivisionError]
    assert broken.aborted and after.got == [30]


async def test_a_crowd_delays_no_client_of_another_address(site: Site) -> None:
    """One of its reads is processed in its turn, beyond the time of all, and those after it one by one."""
    crowd = [Wire(site, 100) for _ in range(300)]
    others = [Wire(site, 100, address) for address in ("b", "c", "b")]
    assert await site.turn([*crowd, *others]) <= TURN_S + 4 * COST_S
    assert others[0].got and not others[2].got
    await site.turn([])
    assert all(other.got for other in others)
    assert not crowd[-2].got


async def test_crowds_from_many_addresses_do_not_make_a_turn_long(site: Site) -> None:
    wires = [Wire(site, 100, str(number)) for number in range(300)]
    assert await site.turn(wires) <= TURN_S + (MOST_LATE + 1) * COST_S
    while not all(wire.got for wire in wires):
        await site.turn([])
    assert site.order == wires


def test_the_oldest_and_the_newest_of_each_client_are_taken_by_turns() -> None:
    """Also of two clients whose turns alternate: the oldest of one must not wait for all newer ones."""
    queues: ClientQueues[str] = ClientQueues()
    for item in ("a1", "b1", "a2", "b2", "a3", "b3", "a4"):
        queues.add(item[0], item)
    assert [queues.take() for _ in range(7)] == ["a1", "b1", "a4", "b3", "a2", "b2", "a3"]
    assert not queues


async def test_answers_of_replicas_and_requests_are_processed_by_turns(site: Site) -> None:
    crowd, replicas = [Wire(site, 100) for _ in range(300)], [Wire(site, 100, "") for _ in range(20)]
    await site.turn([*crowd, *replicas])
    assert not any(replica.got for replica in replicas)
    before = len(site.order)
    await site.turn([])
    assert [wire in crowd for wire in site.order[before:][:2]] == [False, True]


async def test_a_protocol_that_falls_behind_is_called_again_in_later_turns(site: Site) -> None:
    wire, calls = Wire(site, 300, ""), 0

    def take(data: bytes) -> None:
        nonlocal calls
        calls += 1
        if calls < 4:
            wire.reader.fall_behind()

    wire.reader = PacedReader(cast("asyncio.Transport", wire), take)
    for turn in range(1, 6):
        await site.turn([wire])
        assert calls == min(turn, 4)
        assert wire.reading is (turn >= 4)
    calls = 0
    wire.left = 10
    await site.turn([wire])
    wire.reader.close()
    assert calls == 4, "what a lost connection still has is processed"


async def test_thousands_of_clients_that_leave_together_are_closed_in_many_turns(site: Site) -> None:
    wires = [Wire(site, 10) for _ in range(1000)]
    for wire in wires:
        site.turns.close(cast("asyncio.Transport", wire))
    while not wires[-1].closed:
        before = sum(wire.closed for wire in wires)
        await site.turn([])
        assert 0 < sum(wire.closed for wire in wires) - before <= MOST_CLOSED


async def test_requests_of_thousands_of_lost_connections_end_in_many_turns(site: Site) -> None:
    ended: list[int] = []
    for number in range(1000):
        site.turns.lose(partial(ended.append, number))
    assert len(ended) == MOST_CLOSED, "one that is lost alone ends at once"
    while len(ended) < 1000:
        before = len(ended)
        await site.turn([])
        assert 0 < len(ended) - before <= MOST_CLOSED
    assert ended == sorted(ended)


class Starts:
    """Requests of a turn's time each, by ``costs``, as :class:`gateway.http.server.HttpServer` begins
    them.
    """

    def __init__(self) -> None:
        self.now = 1.0
        self.turns = RequestStarts(lambda: self.now)
        self.order: list[int] = []

    async def begin(self, number: int, cost_s: float, size: int = 100, client: str = "a") -> None:
        if not self.turns.may_begin(size, client):
            await self.turns.wait(client)
        self.now += cost_s
        self.order.append(number)


@pytest.mark.parametrize("part", [2, 20, 400])
async def test_hundreds_of_requests_that_come_at_once_begin_in_many_turns(part: int) -> None:
    starts, cost_s, count = Starts(), STARTS_S / part, 300
    tasks = [asyncio.create_task(starts.begin(number, cost_s)) for number in range(count)]
    turns = 0
    while len(starts.order) < len(tasks):
        before = starts.now
        await asyncio.sleep(0)
        turns += 1
        assert starts.now - before < STARTS_S + 2 * cost_s
        if (
            turns % 2
        ):  # new ones, which do not wait for the crowd, and of which the crowd does not wait for all
            tasks.append(asyncio.create_task(starts.begin(len(tasks), cost_s)))
    assert starts.order[:2] == [0, 1]  # at once
    assert sorted(starts.order) == [*range(len(tasks))]
    assert turns < (len(tasks) * cost_s / (STARTS_S - SMALL_STARTS_S) + len(tasks) / MOST_STARTED) + 10
    if part < 400:
        assert starts.order.index(count) < 2 * part + MOST_STARTED


async def test_a_request_that_is_cancelled_while_it_waits_keeps_no_place() -> None:
    starts = Starts()
    tasks = [asyncio.create_task(starts.begin(number, STARTS_S)) for number in range(100)]
    await asyncio.sleep(0)
    for task in tasks[2:99]:
        task.cancel()
    for _ in range(12):
        await asyncio.sleep(0)
    assert starts.order == [0, 1, 99]  # one of a client beyond the time of the turn


async def test_a_request_of_another_client_begins_at_once_in_a_crowd() -> None:
    starts = Starts()
    tasks = [asyncio.create_task(starts.begin(number, STARTS_S / 8)) for number in range(100)]
    tasks += [asyncio.create_task(starts.begin(number, 0.0, client="b")) for number in (100, 101)]
    await asyncio.sleep(0)
    assert 100 in starts.order and len(starts.order) <= 11
    for _ in range(3):
        await asyncio.sleep(0)
    assert 101 in starts.order and len(starts.order) < 40
    for task in tasks:
        task.cancel()


async def test_a_small_request_begins_at_once_among_large_ones() -> None:
    starts = Starts()
    large = [asyncio.create_task(starts.begin(0, SMALL_STARTS_S / 2, SMALL_BYTES + 1)) for _ in range(100)]
    while len(starts.order) < len(large):
        small = asyncio.create_task(starts.begin(1, 0.0))
        await asyncio.sleep(0)
        assert small.done()
        starts.order.remove(1)
