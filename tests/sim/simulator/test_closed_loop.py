"""A closed loop as a timeline: what follows is sent after what it follows has ended."""

from __future__ import annotations

import math

import numpy as np

from sim.arrivals import Arrival
from sim.simulator.closed_loop import ClosedLoop
from tests.sim.simulator.test_run import deployment, run

INF = math.inf


def turn(at: float, session: int, follows: int = 0, think_s: float = 0.0) -> Arrival:
    return Arrival(at, 100, 10, session=session, follows=follows, think_s=think_s)


def test_a_turn_is_sent_after_the_one_before_has_ended() -> None:
    first, second = turn(1.0, 7), turn(3.0, 7, follows=7, think_s=2.0)
    loop = ClosedLoop(iter((first, second)))
    assert loop.next_at(0.5) == INF and not loop.over
    assert loop.next_at(9.0) == 1.0 and loop.pop() is first
    assert loop.next_at(9.0) == INF and loop.over
    loop.ended(7, 5.0)
    assert loop.next_at(9.0) == 7.0 and not loop.over and loop.pop() is second


def test_an_end_before_its_follower_is_read_is_kept() -> None:
    loop = ClosedLoop(iter((turn(1.0, 7), turn(30.0, 7, follows=7, think_s=29.0))))
    loop.next_at(1.0)
    loop.pop()
    loop.ended(7, 2.0)
    assert loop.next_at(29.0) == INF
    assert loop.next_at(30.0) == 31.0


def test_a_parent_waits_for_its_subagent() -> None:
    parts = [turn(1.0, 1), turn(1.0, 2, 1), turn(2.0, 2, 2, 1.0), turn(4.0, 1, 2, 2.0), turn(5.0, 1, 1, 1.0)]
    loop = ClosedLoop(iter(parts))
    sent, at = [], 0.0
    while not loop.over:
        at = max(at, loop.next_at(INF))
        found = loop.pop()
        sent.append((at, found.session))
        at += 10.0
        loop.ended(found.session, at)
    assert sent == [(1.0, 1), (11.0, 2), (22.0, 2), (34.0, 1), (45.0, 1)]


def test_a_slice_without_the_first_turn_is_sent_at_its_instants() -> None:
    loop = ClosedLoop(iter((turn(3.0, 7, follows=7, think_s=2.0), turn(4.0, 7, follows=7, think_s=1.0))))
    assert loop.next_at(INF) == 3.0
    loop.pop()
    assert loop.next_at(INF) == INF
    loop.ended(7, 6.0)
    assert loop.next_at(INF) == 7.0


def test_the_simulator_sends_turns_in_a_closed_loop() -> None:
    trace = [turn(0.5 * i, 1, follows=min(i, 1), think_s=0.5 if i else 0.0) for i in range(5)]
    requests = run(deployment(), iter(trace), "static").requests["m"]
    assert len(requests) == 5
    np.testing.assert_allclose(np.diff(requests.at), requests.e2e_s[:-1] + 0.5, rtol=1e-9)
