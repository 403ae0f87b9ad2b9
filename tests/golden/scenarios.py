"""What is played for the golden traces: loads and mishaps, on fleets small enough to reckon through."""

from __future__ import annotations

import math
from collections.abc import Callable

from policy.config.control import ScaleConfig
from policy.config.deployment import ResourceBudget
from policy.scaling.decide import ModelPolicies
from policy.scaling.decision_types import ModeOverride
from policy.scaling.policies.registry import choose, make
from tests.policy.control_play import BOTH, NOON, QUICK, SMALL, Fleet, Model, mode_option


def live(shadow: str | None = None) -> ModelPolicies:
    """The policy that decides where the document names none."""
    live = make(choose("policy", "predictive"))
    return ModelPolicies(live, None if shadow is None else make(choose("shadow", shadow)))


def diurnal() -> Fleet:
    """A day in an hour: from one request a second at night to six at noon."""

    def load(t: float) -> float:
        return 3.5 - 2.5 * math.cos(2 * math.pi * t / 3600)

    return Fleet(Model("chat", load, policies=live("target_tracking")), tick_s=15.0).run(3600)


def step() -> Fleet:
    """One request a second, six for ten minutes, one again."""
    return Fleet(Model("chat", lambda t: 6.0 if 120 <= t < 720 else 1.0, policies=live())).run(1200)


def flash() -> Fleet:
    """Twenty times the load for 40 seconds, which no start can meet."""
    burst = Model("chat", lambda t: 20.0 if 120 <= t < 160 else 1.0, policies=live(), spillover=True)
    return Fleet(burst, budget=ResourceBudget(gpus=6)).run(600)


def stale() -> Fleet:
    """The load falls, and just then the gateways are silent for two minutes."""
    model = Model(
        "chat", lambda t: 4.0 if t < 100 else 0.5, policies=live(), count=5, stale=lambda t: 120 <= t < 240
    )
    return Fleet(model).run(480)


def crash_loop() -> Fleet:
    """Load grows and every start fails for four minutes."""
    model = Model(
        "chat", lambda t: 1.0 if t < 60 else 3.0, policies=live(), count=2, fails=lambda t: 60 <= t < 300
    )
    return Fleet(model).run(480)


def shared() -> Fleet:
    """Eight cards: the second model, which goes first, needs more of them for five minutes."""
    batch = Model("batch", lambda t: 5.0, policies=live(), count=6)
    chat = Model(
        "chat",
        lambda t: 5.0 if 120 <= t < 420 else 1.0,
        policies=live(),
        count=2,
        priority=10,
        spillover=True,
    )
    return Fleet(batch, chat, budget=ResourceBudget(gpus=8)).run(780)


def crossover() -> Fleet:
    """One large replica meets the objective until it cannot keep up; then eight small ones, and back."""
    model = Model(
        "chat", lambda t: 7.5 if 300 <= t < 1500 else 2.0, mode_options=BOTH, slo=QUICK, policies=live()
    )
    return Fleet(model, budget=ResourceBudget(gpus=12)).run(2100)


def zero() -> Fleet:
    """Nobody for twelve minutes, and then somebody waits."""
    model = Model(
        "chat",
        lambda t: 1.0 if t < 60 or t >= 800 else 0.0,
        mode_options=(mode_option(SMALL.mode, least=0),),
        scale=ScaleConfig(zero_after_s=300.0),
        policies=live(),
        count=2,
    )
    return Fleet(model).run(960)


def override() -> Fleet:
    """Somebody sets five replicas for five minutes, and later two, which is too few."""

    def hand(t: float) -> ModeOverride | None:
        for begins, ends, count in ((60, 360, 5), (600, 780, 2)):
            if begins <= t < ends + 30:
                return ModeOverride(mode=SMALL.mode, count=count, until=NOON + ends)
        return None

    return Fleet(Model("chat", lambda t: 2.5, policies=live(), count=3, override=hand)).run(900)


SCENARIOS: dict[str, Callable[[], Fleet]] = {
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
