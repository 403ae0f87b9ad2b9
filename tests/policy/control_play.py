"""A simulated fleet under scaling decisions: changing loads, starting and leaving replicas, shared budgets.

Time advances in ticks. Load is continuous: requests beyond the capacity of serving replicas are queued.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from policy.config.control import GuardConfig, ModeSwitchConfig, ScaleConfig, SloConfig
from policy.config.deployment import ResourceBudget
from policy.engine.builtin_profiles import profile
from policy.engine.performance_model import Timing
from policy.engine.replica_capacity import capability
from policy.scaling.budget_resources import Resources, summed, total
from policy.scaling.decide import ModelPolicies, decide_all, workload_of
from policy.scaling.decision_types import Decision, DecisionMemory, ModeOption, ModeOverride, Situation
from policy.scaling.reconcile_steps import Layer, LayerKey, RolloutGoal, RolloutPlanner
from policy.scaling.view import Proposal, Supply, View
from policy.signals.types import ModelDemand, Rates, ReplicaSample, Signals

NOON = 1_700_000_000.0
INPUT_TOKENS, OUTPUT_TOKENS = 1000.0, 150.0
# How long a request runs.
SERVICE_S = 3.0


def timing(name: str, degree: int = 1) -> Timing:
    found = profile(name)
    return Timing(limits=found.limits(degree), model=found.model.at_degree(degree))


def mode_option(
    mode: str, *, gpus: int = 1, least: int = 1, most: int = 8, of: str = "l4-8b", **changes: Any
) -> ModeOption:
    given: dict[str, Any] = {"shape": mode, "gpus": gpus, "lead_s": 30.0, "timing": timing(of, gpus or 1)}
    return ModeOption(mode=mode, least=least, most=most, **(given | changes))


SMALL = mode_option("multi-replica")
LARGE = mode_option("single-large", gpus=4, most=1)
BOTH = (LARGE, SMALL)
# Only the large shape meets this, up to 4.7 requests per second; at 7 the small one costs less.
QUICK = SloConfig(ttft_p95_s=3.0, itl_p95_s=0.06)


def rates(rate: float) -> Rates:
    return Rates(last_6_s=rate, last_20_s=rate, last_60_s=rate, last_600_s=rate)


def demand(rate: float, **changes: Any) -> ModelDemand:
    given: dict[str, Any] = {
        "age_s": 0.5,
        "arrivals": rates(rate),
        "refused": rates(0.0),
        "concurrency": rates(rate * SERVICE_S),
        "input_tokens": INPUT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
    }
    return ModelDemand(**(given | changes))


def figures(count: int, age_s: float = 0.5, running: int = 1) -> tuple[ReplicaSample, ...]:
    return tuple(ReplicaSample(id=f"r{i}", age_s=age_s, running=running) for i in range(count))


def situation(rate: float = 1.0, count: int = 1, **changes: Any) -> Situation:
    """A model at rest, with ``count`` replicas of its one mode that all serve."""
    given: dict[str, Any] = {
        "at": NOON,
        "tick_s": 5.0,
        "model": "chat",
        "priority": 0,
        "mode": SMALL.mode,
        "count": count,
        "settled": True,
        "mode_options": (SMALL,),
        "supply": Supply(wanted=count, serving=count),
        "signals": Signals(demand=demand(rate), replicas=figures(count)),
        "slo": SloConfig(),
        "scale": ScaleConfig(),
        "switching": ModeSwitchConfig(),
        "guard": GuardConfig(),
        "queue_s": 60.0,
    }
    return Situation(**(given | changes))


@functools.cache
def max_rate(timing: Timing) -> float:
    """The highest rate in requests per second that a replica serves."""
    return capability(timing, workload_of(demand(1.0)), SloConfig()).mu_max


class Proportional:
    """A test policy: as many replicas as the recent rate needs; it counts its calls."""

    def decide(self, view: View, memory: Any) -> Proposal:
        seen = view.signals.demand
        asked = 1 + (memory or {}).get("asked", 0)
        rate = 0.0 if seen is None else seen.arrivals.last_20_s
        mu = view.capability.mu or view.capability.mu_max
        count = math.ceil(rate / mu - 1e-9)
        kept = {"asked": asked}
        if seen is None:
            return Proposal(count=view.count, reason="nothing is known", memory=kept)
        reason = f"{rate:.2f} req/s of {mu:.2f} each"
        return Proposal(count=count, reason=reason, terms={"rate": rate / mu}, forecast=rate, memory=kept)


@dataclass
class Fixed:
    """A test policy that always proposes the same count."""

    count: int

    def decide(self, view: View, memory: Any) -> Proposal:
        return Proposal(count=self.count, reason=f"{self.count} wanted")


def decide(
    given: Situation, policies: ModelPolicies | int | None = None, budget: ResourceBudget | None = None
) -> tuple[Decision, DecisionMemory]:
    """The decision for one model alone; a number is a policy that proposes it."""
    if isinstance(policies, int):
        policies = ModelPolicies(Fixed(policies))
    return decide_all(
        {given.model: given},
        budget or ResourceBudget(),
        {given.model: policies or ModelPolicies(Proportional())},
    )[given.model]


@dataclass
class _Replica:
    mode: str
    ready_at: float
    gone_at: float | None = None


@dataclass
class Model:
    """One model of the run: ``load`` is its rate by seconds since the beginning."""

    name: str
    load: Callable[[float], float]
    mode_options: tuple[ModeOption, ...] = (SMALL,)
    policies: ModelPolicies = field(default_factory=lambda: ModelPolicies(Proportional()))
    mode: str = ""
    count: int = 1
    priority: int = 0
    slo: SloConfig = field(default_factory=SloConfig)
    scale: ScaleConfig = field(default_factory=ScaleConfig)
    switching: ModeSwitchConfig = field(default_factory=ModeSwitchConfig)
    spillover: bool = False
    drain_s: float = 10.0
    fails: Callable[[float], bool] = lambda at: False
    stale: Callable[[float], bool] = lambda at: False
    override: Callable[[float], ModeOverride | None] = lambda at: None
    # The state of the run.
    memory: DecisionMemory = field(default_factory=DecisionMemory)
    replicas: list[_Replica] = field(default_factory=list)
    wanted: dict[str, int] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    queue: float = 0.0
    failures: int = 0
    reported_at: float = 0.0
    last: ModelDemand | None = None

    def __post_init__(self) -> None:
        self.mode = self.mode or self.mode_options[0].mode
        self.wanted = {self.mode: self.count}
        self.replicas = [_Replica(self.mode, 0.0) for _ in range(self.count)]

    def of(self, mode: str) -> ModeOption:
        return next(option for option in self.mode_options if option.mode == mode)

    def serving(self, mode: str, at: float) -> int:
        return sum(r.mode == mode and r.gone_at is None and r.ready_at <= at for r in self.replicas)

    def layer(self, mode: str, at: float) -> Layer:
        mine = [replica for replica in self.replicas if replica.mode == mode]
        return Layer(
            wanted=self.wanted.get(mode, 0),
            starting=sum(r.gone_at is None and r.ready_at > at for r in mine),
            ready=self.serving(mode, at),
            draining=sum(r.gone_at is not None for r in mine),
            failures=self.failures if mode == self.mode else 0,
        )


class Fleet:
    """Models that share a budget, one decision of all of them every ``tick_s``."""

    def __init__(self, *models: Model, budget: ResourceBudget | None = None, tick_s: float = 5.0) -> None:
        self.models = models
        self.budget = budget or ResourceBudget()
        self.tick_s = tick_s
        self.at = 0.0
        self.log: list[tuple[dict[str, Situation], dict[str, Decision]]] = []

    def run(self, until: float) -> Fleet:
        while self.at < until:
            self.tick()
        return self

    def tick(self) -> None:
        for model in self.models:
            self._advance(model)
        situations = {model.name: self._situation(model) for model in self.models}
        decided = decide_all(situations, self.budget, {model.name: model.policies for model in self.models})
        self.log.append((situations, {name: decision for name, (decision, _) in decided.items()}))
        for model in self.models:
            decision, model.memory = decided[model.name]
            model.mode, model.count = decision.mode, decision.count
        for model in self.models:
            self._apply(model)
        self.at += self.tick_s

    def taken(self, resource: str) -> float:
        """The amount of ``resource`` that all replicas hold."""
        return sum(
            float(getattr(model.of(replica.mode), resource))
            for model in self.models
            for replica in model.replicas
        )

    def decisions(self, model: str) -> list[Decision]:
        return [decisions[model] for _, decisions in self.log]

    def _advance(self, model: Model) -> None:
        """The arrivals, starts and ends since the last tick."""
        model.replicas = [r for r in model.replicas if r.gone_at is None or r.gone_at > self.at]
        for replica in model.replicas:
            due = self.at - self.tick_s < replica.ready_at <= self.at and self.at > 0
            if due and replica.gone_at is None:
                if model.fails(self.at):
                    replica.ready_at = self.at + model.of(replica.mode).lead_s
                    model.failures += 1
                else:
                    model.failures = 0
        rate = model.load(self.at)
        model.rates.append(rate)
        carried = sum(
            max_rate(model.of(r.mode).timing)
            for r in model.replicas
            if r.gone_at is None and r.ready_at <= self.at
        )
        model.queue = max(0.0, model.queue + (rate - carried) * self.tick_s)

    def _demand(self, model: Model) -> ModelDemand:
        def mean(seconds: float) -> float:
            part = model.rates[-max(1, round(seconds / self.tick_s)) :]
            return math.fsum(part) / len(part)

        arrivals = Rates(last_6_s=mean(6), last_20_s=mean(20), last_60_s=mean(60), last_600_s=mean(600))
        idle = sum(1 for _ in itertools.takewhile(lambda rate: rate == 0.0, reversed(model.rates)))
        queued = math.floor(model.queue)
        level = model.rates[-1] * SERVICE_S + queued
        return demand(
            0.0, arrivals=arrivals, concurrency=rates(level), queued=queued, idle_s=idle * self.tick_s
        )

    def _situation(self, model: Model) -> Situation:
        if not model.stale(self.at):
            model.last, model.reported_at = self._demand(model), self.at
        age_s = self.at - model.reported_at
        seen = None if model.last is None else msgspec.structs.replace(model.last, age_s=age_s + 0.5)
        layer = model.layer(model.mode, self.at)
        leaving = {
            option.mode: model.layer(option.mode, self.at).occupied
            for option in model.mode_options
            if option.mode != model.mode and model.layer(option.mode, self.at).occupied
        }
        starting = sorted(
            max(0.0, replica.ready_at - self.at)
            for replica in model.replicas
            if replica.mode == model.mode and replica.gone_at is None and replica.ready_at > self.at
        )
        busy = math.ceil(model.rates[-1] * SERVICE_S)
        return Situation(
            at=NOON + self.at,
            tick_s=self.tick_s,
            model=model.name,
            priority=model.priority,
            mode=model.mode,
            count=model.count,
            settled=layer.ready >= model.count and not leaving,
            mode_options=model.mode_options,
            supply=Supply(
                wanted=layer.wanted,
                serving=layer.ready,
                starting_s=tuple(starting),
                draining=layer.draining,
                failures=layer.failures,
            ),
            signals=Signals(demand=seen, replicas=figures(layer.ready, age_s + 0.5, busy)),
            slo=model.slo,
            scale=model.scale,
            switching=model.switching,
            guard=GuardConfig(),
            queue_s=60.0,
            leaving=leaving,
            spillover=model.spillover,
            override=model.override(self.at),
            memory=model.memory,
        )

    def _apply(self, model: Model) -> None:
        """Let the planner set the next counts, and apply them."""
        layers = {
            self._key(model, option.mode): model.layer(option.mode, self.at) for option in model.mode_options
        }
        footprints = {self._key(model, one.mode): Resources(one.gpus, one.cpus) for one in model.mode_options}
        others = summed(
            Resources(other.of(replica.mode).gpus, other.of(replica.mode).cpus)
            for other in self.models
            for replica in other.replicas
            if other is not model
        )
        goal = RolloutGoal(
            key=self._key(model, model.mode),
            count=model.count,
            min_healthy=min(model.scale.min_healthy, model.count),
            gap=model.of(model.mode).gap_s > 0,
        )
        rollout = RolloutPlanner(goal, layers, footprints, total(self.budget).plus(others, -1))
        for key, count in rollout.step().items():
            self._set(model, key.shape, count)

    @staticmethod
    def _key(model: Model, mode: str) -> LayerKey:
        return LayerKey(model.name, mode, 1)

    def _set(self, model: Model, mode: str, count: int) -> None:
        model.wanted[mode] = count
        mine = [r for r in model.replicas if r.mode == mode and r.gone_at is None]
        # Replicas that do not serve yet leave first, and at once.
        for replica in sorted(mine, key=lambda r: -r.ready_at)[: max(0, len(mine) - count)]:
            replica.gone_at = self.at + (model.drain_s if replica.ready_at <= self.at else 0.0)
        lead_s = model.of(mode).lead_s
        model.replicas += [_Replica(mode, self.at + lead_s) for _ in range(count - len(mine))]


def replayed(
    situations: Mapping[str, Situation], budget: ResourceBudget, policies: Mapping[str, ModelPolicies]
) -> dict[str, Decision]:
    """The decisions for logged situations, after a round trip through JSON."""
    logged = msgspec.json.decode(msgspec.json.encode(dict(situations)), type=dict[str, Situation])
    made = decide_all(logged, msgspec.json.decode(msgspec.json.encode(budget), type=ResourceBudget), policies)
    return {name: decision for name, (decision, _) in made.items()}
