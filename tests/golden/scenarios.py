"""What is played for the golden traces: loads and mishaps, on fleets small enough to reckon through."""

from __future__ import annotations

import math
from collections.abc import Callable

from policy.config.control import ScaleConfig
from policy.config.deployment import Budget
from policy.scaling.decide import ModelPolicies
from policy.scaling.decision_types import Override
from policy.scaling.policies.registry import choose, make
from tests.policy.control_play import BOTH, NOON, QUICK, SMALL, Model, Play, rung


def mind(shadow: str | None = None) -> ModelPolicies:
    """The policy that decides where the document names none."""
    live = make(choose("policy", "predictive"))
    return ModelPolicies(live, None if shadow is None else make(choose("shadow", shadow)))


def diurnal() -> Play:
    """A day in an hour: from one request a second at night to six at noon."""

    def load(t: float) -> float:
        return 3.5 - 2.5 * math.cos(2 * math.pi * t / 3600)

    return Play(Model("chat", load, mind=mind("target_tracking")), tick_s=15.0).run(3600)


def step() -> Play:
    """One request a second, six for ten minutes, one again."""
    return Play(Model("chat", lambda t: 6.0 if 120 <= t < 720 else 1.0, mind=mind())).run(1200)


def flash() -> Play:
    """Twenty times the load for 40 seconds, which no start can meet."""
    burst = Model("chat", lambda t: 20.0 if 120 <= t < 160 else 1.0, mind=mind(), overflow=True)
    return Play(burst, budget=Budget(gpus=6)).run(600)


def stale() -> Play:
    """The load falls, and just then the gateways are silent for two minutes."""
    model = Model(
        "chat", lambda t: 4.0 if t < 100 else 0.5, mind=mind(), count=5, deaf=lambda t: 120 <= t < 240
    )
    return Play(model).run(480)


def crash_loop() -> Play:
    """Load grows and every start fails for four minutes."""
    model = Model(
        "chat", lambda t: 1.0 if t < 60 else 3.0, mind=mind(), count=2, fails=lambda t: 60 <= t < 300
    )
    return Play(model).run(480)


def shared() -> Play:
    """Eight cards: the second model, which goes first, needs more of them for five minutes."""
    batch = Model("batch", lambda t: 5.0, mind=mind(), count=6)
    chat = Model(
        "chat", lambda t: 5.0 if 120 <= t < 420 else 1.0, mind=mind(), count=2, priority=10, overflow=True
    )
    return Play(batch, chat, budget=Budget(gpus=8)).run(780)


def crossover() -> Play:
    """One large replica meets the objective until it cannot keep up; then eight small ones, and back."""
    model = Model("chat", lambda t: 7.5 if 300 <= t < 1500 else 2.0, rungs=BOTH, slo=QUICK, mind=mind())
    return Play(model, budget=Budget(gpus=12)).run(2100)


def zero() -> Play:
    """Nobody for twelve minutes, and then somebody waits."""
    model = Model(
        "chat",
        lambda t: 1.0 if t < 60 or t >= 800 else 0.0,
        rungs=(rung(SMALL.mode, least=0),),
        scale=ScaleConfig(zero_after_s=300.0),
        mind=mind(),
        count=2,
    )
    return Play(model).run(960)


def override() -> Play:
    """Somebody sets five replicas for five minutes, and later two, which is too few."""

    def hand(t: float) -> Override | None:
        for begins, ends, count in ((60, 360, 5), (600, 780, 2)):
            if begins <= t < ends + 30:
                return Override(mode=SMALL.mode, count=count, until=NOON + ends)
        return None

    return Play(Model("chat", lambda t: 2.5, mind=mind(), count=3, override=hand)).run(900)


SCENARIOS: dict[str, Callable[[], Play]] = {
    "diurnal": diurnal,
    "step_1_6_1": step,
    "flash_burst": flash,
    "stale_gateway": stale,
    "crash_looping_starts": crash_loop,
    "shared_budget": shared,
    "mode_crossover": crossover,
    "zero_and_wake": zero,
    "override_with_a_term": override,
}
