"""Mode switches by load, there and back: with a controller killed in each phase, and failing.

One replica over four GPUs has a lower latency than four of one GPU each, which have more capacity.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from policy.errors import SwitchRefused
from serve.autoscaler.decision_journal import DecisionRound
from serve.controller_api_schema import SwitchOutcome
from tests.serve.plane import LARGE, READY, SMALL, Plane
from tests.serve.sim_documents import document, sim_model
from tests.serve.traffic import Traffic

# Requests per second that the one replica serves within the SLO, and that only the four serve.
LOW, HIGH = 5.0, 330.0
ROOMY, SCARCE = 8, 4

pytestmark = pytest.mark.slow


def written(gpus: int, **control: Any) -> dict[str, Any]:
    """A document whose model starts in the large mode, with a budget of so many GPUs."""
    model = sim_model(
        sim={"profile": "h100-8b"},
        shapes={"large": {"gpus": 4, "tensor_parallel": 4, "cpus": 1}, "small": {"gpus": 1, "cpus": 1}},
        modes={
            "single-large": {"shape": "large", "replicas": 1},
            "multi-replica": {"shape": "small", "replicas": {"min": 4, "max": 4}},
        },
        control={
            "tick_s": 1,
            "policy": "target_tracking",
            "slo": {"itl_p95_s": 0.006},
            "mode": {"confirm_s": 5, "dwell_s": 15, "drain_timeout_s": 10},
            "scale": {"hold_s": 5},
            "start_timeout_s": 60,
            "assumed_start_s": 5,
        },
    )
    model["control"] |= control
    return document(model, budget={"gpus": gpus})


class Switch:
    """Load that changes, starts and drains that take some time, and a controller that may be killed."""

    def __init__(self, plane: Plane, *, kills: bool = False) -> None:
        self.plane = plane
        self.traffic = Traffic(plane)
        self.kills = kills
        self.phases: list[str] = []
        self.fewest = 99
        self._looks = 0

    async def run(self, rate: float, seconds: float) -> None:
        for _ in range(round(seconds * 2)):
            await self.look(rate)

    async def look(self, rate: float) -> None:
        """Half a second."""
        self._looks += 1
        self.traffic.rates["m"] = rate
        if self._looks % 2 == 0:
            self.traffic.report()
        if self._looks % 4 == 0:
            self.plane.cluster.ready()
        if self._looks % 4 == 2:
            self.plane.cluster.drained()
        self.plane.now += 0.3
        await self.plane.ticks(1)
        self.fewest = min(self.fewest, sum(self.plane.counts(READY).values()))
        self.phases.append(self.plane.phase())
        if self.kills and self._looks % 22 == 0:
            await self.plane.restart()


async def up(plane: Plane, gpus: int, **control: Any) -> Switch:
    await plane.up(written(gpus, **control))
    switch = Switch(plane)
    await switch.run(LOW, 10)
    assert plane.counts(READY) == {LARGE: 1}
    plane.cluster.slow = True
    return switch


def switches(plane: Plane) -> list[str]:
    found: list[str] = []
    for event in plane.controller.status().events:
        _, is_target, rest = event.partition(" m: target ")
        mode = rest.split(" ")[0]
        if is_target and (not found or found[-1] != mode):
            found.append(mode)
    return found


@pytest.mark.parametrize("gpus", [ROOMY, SCARCE])
async def test_the_load_decides_both_mode_switches(plane: Plane, gpus: int) -> None:
    switch = await up(plane, gpus)
    await switch.run(HIGH, 80)
    assert plane.counts(READY) == {SMALL: 4}
    await switch.run(LOW, 90)
    assert plane.counts(READY) == {LARGE: 1}
    assert switches(plane)[-2:] == ["multi-replica", "single-large"]
    if gpus == ROOMY:
        assert switch.fewest >= 1
        assert {"switching", "draining the old"} <= set(switch.phases)
    else:
        assert {"giving way", "starting"} <= set(switch.phases)


async def test_the_predicted_saving_is_compared_with_the_measured(plane: Plane) -> None:
    switch = await up(plane, ROOMY)
    switch.traffic.met = 0.5
    while plane.counts(READY) != {SMALL: 4}:
        await switch.run(HIGH, 1)
    switch.traffic.met = 1.0
    await switch.run(HIGH, 160)
    (found,) = outcomes(plane)
    assert (found.was, found.mode) == ("single-large", "multi-replica")
    assert 0.15 <= found.promised < 1
    assert found.measured > 0.2
    assert found.met_before < 0.8 < found.met
    (event,) = [
        event
        for event in plane.controller.status().events
        if "predicted gain" in event and "measured" in event
    ]
    assert f"predicted gain {found.promised:.0%}, measured: gain {found.measured:.0%}" in event
    # It is logged with its decision only.
    decisions = plane.controller.autoscaler.journal.read(500)
    assert [(each.decision.mode, each.outcome) for each in decisions if each.outcome] == [
        ("multi-replica", found)
    ]
    assert next(each.decision for each in decisions if each.outcome).changes


def outcomes(plane: Plane) -> list[SwitchOutcome]:
    journal = plane.controller.autoscaler.journal
    journal.flush()
    return [line for line in journal.lines() if isinstance(line, SwitchOutcome)]


PHASES = {ROOMY: ("steady", "switching", "draining the old"), SCARCE: ("steady", "giving way", "starting")}
EACH = [(gpus, phase, back) for gpus, phases in PHASES.items() for phase in phases for back in (False, True)]


@pytest.mark.parametrize(("gpus", "phase", "back"), EACH)
async def test_a_switch_survives_a_killed_controller(plane: Plane, gpus: int, phase: str, back: bool) -> None:
    switch = await up(plane, gpus)
    if back:
        await switch.run(HIGH, 80)
    to, rate, goal = ("single-large", LOW, {LARGE: 1}) if back else ("multi-replica", HIGH, {SMALL: 4})
    await until_phase(switch, rate, phase, to)
    assert plane.phase() == phase
    mode = plane.controller.status().models[0].mode
    since = plane.target().since
    await plane.restart()
    plane.cluster.beat_all()
    assert (plane.controller.status().models[0].mode, plane.phase()) == (mode, phase)
    await switch.run(rate, 110)
    assert plane.counts(READY) == goal
    assert plane.phase() == "steady"
    if phase != "steady":
        # It is the same switch.
        assert plane.target().since == since
        assert switches(plane) == []


async def test_a_rollback_continues_after_the_controller_is_killed(plane: Plane) -> None:
    switch = await up(plane, SCARCE)
    plane.cluster.failing[SMALL] = "no memory left"
    await until_phase(switch, HIGH, "rolling back", "single-large")
    before = plane.target()
    assert before.note.startswith("rolled back")
    await plane.restart()
    plane.cluster.beat_all()
    assert plane.target() == before
    await switch.run(HIGH, 20)
    assert plane.counts(READY) == {LARGE: 1}
    assert (plane.phase(), set(plane.target().barred)) == ("steady", {"multi-replica"})
    assert switches(plane) == []


async def until_phase(switch: Switch, rate: float, phase: str, to: str) -> None:
    plane = switch.plane
    for look in range(300):
        aimed = plane.controller.status().models[0].mode == to
        if plane.phase() == phase and (aimed if phase != "steady" else look > 8):
            return
        await switch.look(rate)
    raise AssertionError(f"never {phase}, but {plane.phase()}")


@pytest.mark.parametrize("gpus", [pytest.param(ROOMY, marks=pytest.mark.long), SCARCE])
@pytest.mark.parametrize("kills", [False, pytest.param(True, marks=pytest.mark.long)])
async def test_a_failed_mode_is_retried_with_backoff(plane: Plane, gpus: int, kills: bool) -> None:
    switch = await up(plane, gpus)
    plane.cluster.failing[SMALL] = "no memory left"
    switch.kills = kills
    tries: list[float] = []
    for _ in range(700):
        before = plane.target().barred.get("multi-replica")
        await switch.run(HIGH, 1)
        after = plane.target().barred.get("multi-replica")
        if after is not None and after != before:
            tries.append(plane.now)
            assert plane.controller.status().models[0].barred == {"multi-replica": after.until}
    assert plane.counts(READY) == {LARGE: 1}
    gaps = [round(b - a) for a, b in pairwise(tries)]
    assert 2 <= len(gaps) <= 3
    assert gaps[0] >= 120
    assert gaps[1] >= 240
    assert "rolling back" in switch.phases or gpus == ROOMY
    assert "no memory left" in plane.note() or "rolled back" in plane.note()
    # A successful start clears its failures.
    plane.cluster.failing.clear()
    await switch.run(HIGH, 600)
    assert plane.counts(READY) == {SMALL: 4}
    assert plane.target().barred == {}


async def test_a_manual_switch_dwells_past_its_duration(plane: Plane) -> None:
    switch = await up(plane, ROOMY)
    plane.cluster.slow = False
    plane.controller.mode("m", "multi-replica", 2.0)
    await switch.run(LOW, 12)
    assert plane.counts(READY) == {SMALL: 4}
    await switch.run(LOW, 20)
    assert plane.counts(READY) == {LARGE: 1}


async def test_a_switch_continues_while_the_wall_clock_is_set(plane: Plane) -> None:
    switch = await up(plane, ROOMY)
    await until_phase(switch, HIGH, "switching", "multi-replica")
    # Far past the time that a start may take.
    plane.ahead = 7200.0
    await switch.run(HIGH, 30)
    assert plane.counts(READY) == {SMALL: 4}
    assert switches(plane)[-1] == "multi-replica"


async def test_a_refused_switch_starts_no_dwell_time(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    switch = await up(plane, ROOMY)

    def refuse(*given: object) -> bool:
        raise SwitchRefused("m: no")

    with monkeypatch.context() as taken:
        taken.setattr("serve.state.observed_state.ObservedState.planned", refuse)
        await switch.run(HIGH, 60)
    assert any(event.endswith("m: no") for event in plane.controller.status().events)
    assert plane.counts(READY) == {LARGE: 1}
    journal = plane.controller.autoscaler.journal
    journal.flush()
    rounds = [line for line in journal.lines() if isinstance(line, DecisionRound)]
    assert sum(line.decisions["m"].changes for line in rounds) > 1
    assert {line.situations["m"].memory.switched_at for line in rounds} == {None}
