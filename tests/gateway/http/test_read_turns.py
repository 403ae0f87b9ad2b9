"""The reads of a turn of the event loop share its time, and what is beyond it waits for its own turn."""

from __future__ import annotations

import asyncio
import itertools
from typing import cast

import pytest

from gateway.http import read_turns as module
from gateway.http.read_turns import LATE_BYTES, MOST_RESUMED, READ_BYTES, TURN_S, PacedReader, ReadTurns

COST_S = TURN_S / 5


class Wire:
    """A transport with ``size`` bytes to read; each process of a read takes :data:`COST_S`."""

    def __init__(self, site: Site, size: int) -> None:
        self._site = site
        self.left = size
        self.got: list[int] = []
        self.reading = True
        self.aborted = False
        self.reader = PacedReader(cast("asyncio.Transport", self), self.take)

    def take(self, data: bytes) -> None:
        self._site.now += COST_S
        self._site.order.append(self)
        self.got.append(len(data))

    def is_closing(self) -> bool:
        return self.aborted

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True

    def abort(self) -> None:
        self.aborted = True

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


async def test_hundreds_that_have_data_at_once_are_served_in_many_turns_in_order(site: Site) -> None:
    wires = [Wire(site, 100) for _ in range(300)]
    longest_s = max([await site.turn(wires) for _ in range(200)])
    assert longest_s <= 1.5 * TURN_S + 2 * COST_S
    assert site.order == wires
    assert all(wire.got == [100] and wire.reading for wire in wires)


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
    others, late = [Wire(site, 10) for _ in range(5)], Wire(site, 20)
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
