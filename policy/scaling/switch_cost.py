"""The cost of a mode switch to the requests that are served or wait, in seconds of waiting.

The switch is simulated by the steps of its rollout (:class:`policy.scaling.reconcile_steps.RolloutPlanner`):
replicas start, others drain, and what serves meanwhile has a capacity. On CPUs, engines that start or drain
take cores from those that serve.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from policy.engine.performance_model import Timing
from policy.scaling.budget_resources import Resources
from policy.scaling.decision_types import STANDING_S, ModeOption, SwitchCost
from policy.scaling.reconcile_steps import Layer, LayerKey, RolloutGoal, RolloutPlanner
from policy.signals.types import ModelDemand, Signals

# A start is nearly all imports, in one thread.
START_CORES = 1


def core_share(cores: float, claimed: float) -> float:
    """The part of its speed that an engine has where threads for ``claimed`` cores run on ``cores``."""
    return min(1.0, cores / claimed) if claimed > 0 else 1.0


def start_cores(cpus: int) -> int:
    """The cores that the start of a replica with ``cpus`` cores takes; 0 for one that declares none."""
    return min(cpus, START_CORES)


def describe_gain(gain: float) -> str:
    """A fraction of the present cost that is saved, or how much higher the cost is, which has no bound."""
    if gain > -0.005:
        return f"gain {max(gain, 0.0):.0%}"
    return f"costs {-gain:.0%} more" if gain > -1.0 else f"costs {1.0 - gain:.1f} times as much"


class SwitchPhase(NamedTuple):
    """``seconds`` of a switch in which ``old`` and ``new`` replicas serve at ``speed`` (0 to 1).

    Old replicas that are ``draining`` only end what runs there.
    """

    seconds: float
    old: int
    new: int
    speed: float = 1.0
    draining: int = 0


class ModeSwitch(NamedTuple):
    """A switch from ``serving`` replicas of ``old`` to ``target`` of ``new``.

    The model may hold ``bounds`` and keeps ``min_healthy`` replicas. Its last running request ends in
    ``drain_s``; in ``gap_s``, where there is one, nothing serves.
    """

    old: ModeOption
    new: ModeOption
    serving: int
    target: int
    bounds: Resources
    min_healthy: int
    drain_s: float
    gap_s: float = 0.0

    def phases(self) -> list[SwitchPhase]:
        """The phases in order, without the time after the last old replica has left."""
        if self.gap_s:
            return [SwitchPhase(self.gap_s, 0, 0)]
        was, key = (LayerKey("", option.mode, 0) for option in (self.old, self.new))
        layers = {was: Layer(wanted=self.serving, ready=self.serving), key: Layer()}
        footprints = {was: self.old.resources, key: self.new.resources}
        goal = RolloutGoal(key=key, count=self.target, min_healthy=min(self.min_healthy, self.target))
        rollout = RolloutPlanner(goal, layers, footprints, self.bounds)
        found: list[SwitchPhase] = []
        while layers[was].ready or layers[key].ready < self.target:
            counts = rollout._replace(layers=layers).step()
            stay, ready = min(counts[was], layers[was].ready), layers[key].ready
            leaves, starts = layers[was].ready - stay, counts[key] - ready
            if leaves <= 0 and starts <= 0:
                break  # there is no room for it
            speed = self._speed(stay + leaves, ready, starts)
            # A start time that was measured on shared cores counts them twice: no more than too long a wait.
            seconds = self.drain_s if leaves > 0 else self.new.lead_s / speed
            found.append(SwitchPhase(seconds, stay, ready, speed, max(0, leaves)))
            layers = {was: Layer(wanted=stay, ready=stay), key: Layer(wanted=counts[key], ready=counts[key])}
        return found

    def _speed(self, old: int, new: int, starts: int) -> float:
        claimed = old * self.old.cpus + new * self.new.cpus + max(0, starts) * start_cores(self.new.cpus)
        # A budget that was lowered takes no core from what runs.
        return core_share(max(self.bounds.cpus, self.serving * self.old.cpus, START_CORES), claimed)


class Capacities(NamedTuple):
    """Requests per second of one replica of the old and of the new mode, and the ``rate`` that arrives."""

    old: float
    new: float
    rate: float

    def of(self, phase: SwitchPhase) -> float:
        """What is served in a phase: a replica that drains does half its work on average."""
        old = phase.old + phase.draining / 2
        return phase.speed * (old * self.old + phase.new * self.new)

    def lost(self, phase: SwitchPhase, serving: int) -> float:
        """The part of a phase in which requests wait that ``serving`` old replicas would serve at once.

        An engine at half its speed makes each request wait as long again, whatever the load.
        """
        needed = min(self.rate, serving * self.old)
        served = min(1.0, self.of(phase) / needed) if needed > 0 else phase.speed
        return 1.0 - min(served, phase.speed)

    def clears_s(self, queue: float, phases: Sequence[SwitchPhase], then: float) -> float:
        """Seconds until ``queue`` requests are served: during ``phases``, then at ``then`` requests/s."""
        at = 0.0
        for phase in phases:
            surplus = self.of(phase) - self.rate
            if surplus > 0 and queue <= surplus * phase.seconds:
                return at + queue / surplus
            queue -= surplus * phase.seconds
            at += phase.seconds
        return at + queue / (then - self.rate) if then > self.rate else math.inf


def switch_cost(switch: ModeSwitch, signals: Signals, capacities: Capacities, kv_tokens: int) -> SwitchCost:
    """The cost of a switch; ``kv_tokens`` fit into the caches of one old replica (0: unknown)."""
    demand, phases = signals.demand, switch.phases()
    refill_s = 0.0
    queue = 0.0
    if demand is not None:
        refill_s = _refill_s(demand, switch.new.timing, switch.serving * kv_tokens) / max(1, switch.target)
        queue = float(demand.queued + sum(each.waiting for each in signals.replicas))
    busy = capacities.rate > 0 and switch.serving > 0
    lost_s = math.fsum(phase.seconds * capacities.lost(phase, switch.serving) for phase in phases if busy)
    now_s = then_s = 0.0
    if queue >= 1:
        now_s = capacities.clears_s(queue, (), switch.serving * capacities.old)
        then_s = capacities.clears_s(queue, phases, switch.target * capacities.new) + refill_s
    return SwitchCost(
        lasts_s=math.fsum(phase.seconds for phase in phases),
        start_s=math.fsum(phase.seconds for phase in phases if not phase.draining),
        gap_s=switch.gap_s,
        drain_s=switch.drain_s,
        speed=min((phase.speed for phase in phases), default=1.0),
        refill_s=refill_s if busy else 0.0,
        taken_s=lost_s + (refill_s if busy else 0.0),
        queued=queue,
        clears_s=now_s if now_s < math.inf else None,
        clears_after_s=then_s if then_s < math.inf else None,
    )


def interruption(switch: ModeSwitch, capacities: Capacities, queue_s: float, *, keeps_up: bool) -> str:
    """Why requests would be unserved during the switch, or an empty string.

    If the present mode ``keeps_up``, what serves during the switch has to as well, but for a moment, unless
    there is a gap. If it does not, requests wait in any case, so they may also wait for ``queue_s``.
    """
    phases, rate = switch.phases(), capacities.rate
    # What the present mode could not serve either is not due to the switch.
    worse = [each for each in phases if capacities.of(each) < switch.serving * capacities.old]
    waits_s = sum(each.seconds * max(0.0, 1 - capacities.of(each) / rate) for each in worse) if rate else 0.0
    if waits_s <= (queue_s if switch.gap_s or not keeps_up else STANDING_S):
        return ""
    carried = min(map(capacities.of, worse))
    served = f"{carried:.2f} of {rate:.2f} req/s can be served during the switch"
    return f"{served}: others wait for {waits_s:.0f} s"


def _refill_s(demand: ModelDemand, timing: Timing, cached_tokens: float) -> float:
    """Seconds in which one replica computes what the next turns of the present requests would find cached."""
    if timing.model is None:
        return 0.0
    tokens = demand.hit * demand.input_tokens * demand.concurrency.last_60_s
    chunk = max(1, timing.limits.max_num_batched_tokens)
    return min(tokens, cached_tokens or tokens) / chunk * timing.model.step_time(chunk, 0.0, 1.0)
