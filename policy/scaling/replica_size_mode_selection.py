"""Selection of the mode: the predicted cost of each at the count that it needs, and when to switch.

A mode that meets the SLO costs the GPUs (or cores, or money, if prices are given) of the replicas it needs.
One that misses it costs the largest footprint of any mode, times one plus the miss: more than any mode that
meets the SLO, and the more the larger the miss. One that cannot keep up costs ten such footprints, times the
rate over its capacity. Without an SLO a mode is good enough up to the utilisation
:data:`policy.engine.replica_capacity.FULL`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import NamedTuple

import msgspec

from policy.config.control import SloConfig
from policy.engine.performance_model import EngineLoad
from policy.engine.prefill_estimate import GENERIC
from policy.engine.replica_capacity import FULL, Capability, ExpectedLatency, latency_at
from policy.scaling.budget_resources import ROUNDING, Resources
from policy.scaling.decision_types import ModeForecast, ModeOption, Situation, SwitchCost
from policy.scaling.forecast import likely
from policy.scaling.guardrails import metrics_stale, unsettled
from policy.scaling.reconcile_steps import Layer, LayerKey, RolloutGoal, RolloutPlanner
from policy.scaling.switch_cost import Capacities, ModeSwitch, describe_gain, interruption, switch_cost

# The percentile of the latencies that an SLO bounds.
PERCENTILE = 0.95
# The precision of a prediction: within this factor of a target the SLO counts as met.
PRECISION = 1.01
# The largest error of the engine model that is corrected for.
MOST_ERROR = 0.5
# A latency or a rate of 16 times (two to the fourth) its target costs the most.
CLIP = 4.0
WORST = 2.0 + 2 * CLIP
# The time to clear a queue, where it is added to a rate.
DRAIN_S = 60.0
# The quantile of arrivals during a switch that replicas have to carry.
DURING = 0.95
# The usable fraction of the capacity during a switch.
RESIDUAL = 0.9
# A saving that has been predicted for some time is expected to last as long again, up to an hour: waiting
# until a switch pays then costs at most twice the optimum.
LONGEST_DWELL_S = 3600.0


class ModeSelection(NamedTuple):
    """The result of a comparison: the forecast ``to`` switch to, if any, and its predicted saving ``gain``.

    With ``early`` the switch pays only once lower priorities have been scaled down for it. Until
    ``queue_clears_by`` a switch waits for a queue that is served sooner without it.
    """

    mode_forecasts: tuple[ModeForecast, ...] = ()
    better_since: dict[str, float] = {}
    to: ModeForecast | None = None
    gain: float | None = None
    early: bool = False
    queue_clears_by: float | None = None


def expected(situation: Situation, forecast: float, able: Capability) -> float:
    """The rate in requests per second that a mode has to serve, with the queued requests.

    Without a report of a gateway, what the serving replicas can carry, each with the capacity ``able``: a
    manual switch then loses none of it.
    """
    demand = situation.signals.demand
    if demand is None:
        return situation.supply.serving * (able.mu or able.mu_max * FULL)
    return forecast + demand.queued / DRAIN_S


def expected_peak(situation: Situation, able: Capability, seconds: float) -> float:
    """As :func:`expected`, with a high quantile of the arrivals in ``seconds`` as the forecast."""
    demand = situation.signals.demand
    return expected(situation, likely(demand.arrivals, seconds, DURING) if demand else 0.0, able)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModeComparison:
    """The modes of a model, compared at an expected load.

    ``rate`` requests per second of ``workload`` are expected; ``during`` returns the rate to carry during a
    switch of a given length in seconds. ``reach`` is what the model could hold if lower priorities were
    scaled down, ``alone`` what it could hold without that, ``spare`` what is free. ``fixed`` is a reason why
    no switch is considered.
    """

    situation: Situation
    rate: float
    during: Callable[[float], float]
    workload: EngineLoad
    capabilities: Mapping[str, Capability]
    reach: Resources
    alone: Resources
    spare: Resources
    fixed: str = ""

    @cached_property
    def options(self) -> dict[str, ModeOption]:
        """The modes by name."""
        return {option.mode: option for option in self.situation.mode_options}

    @cached_property
    def largest(self) -> float:
        """The cost of the largest footprint of any mode."""
        price = _price(self.situation.mode_options)
        return max(price[mode] * max(1, self._most(option)) for mode, option in self.options.items())

    def gap_s(self, option: ModeOption) -> float:
        """Seconds in which some requests cannot be served during a switch to ``option``.

        What runs ends first, for at most the drain timeout; then the first replica starts.
        """
        demand = self.situation.signals.demand
        if not option.gap_s or demand is None:
            return option.gap_s
        return option.gap_s + min(demand.drain_s, self.situation.switching.drain_timeout_s)

    def forecasts(self) -> dict[str, ModeForecast]:
        """The forecast of each mode, with the replicas that it needs and the budget allows."""
        price = _price(self.situation.mode_options)
        return {mode: self._forecast(option, price[mode]) for mode, option in self.options.items()}

    def evaluate(self) -> ModeSelection:
        """Compare all modes; the verdict has the switch to make, if any."""
        situation, found = self.situation, self.forecasts()
        here = found[situation.mode]
        known = [there for there in found.values() if not there.why]
        best = min(known, key=lambda there: (there.cost, there.mode != situation.mode), default=here)
        excluded = self.fixed or metrics_stale(situation)
        since: dict[str, float] = {}
        mode_forecasts: list[ModeForecast] = []
        verdict = ModeSelection()
        for mode, forecast in found.items():
            there = forecast
            if mode == situation.mode:
                why = there.why or "the current mode"
            elif there.why or excluded:
                why = there.why or excluded
            else:
                gain = 1 - there.cost / here.cost if here.cost else 0.0
                there = msgspec.structs.replace(forecast, switch=self._switch_cost(forecast))
                # A mode that no longer fits the budget can be left, one of unknown speed cannot be compared.
                why = "" if is_known(self.options[here.mode]) else f"{here.mode}: {here.why}"
                if not why and gain >= situation.switching.gain:
                    since[mode] = situation.memory.better_since.get(mode, situation.at)
                why = why or self._objection(here, there, since.get(mode))
                freed = self._freed(there) if why and best.mode == mode else None
                early = freed is not None and not freed._objection(here, forecast, since.get(mode))
                if best.mode == mode and (early or not why):
                    queue, clears_by = self._queue(there)
                    why = why or queue
                    verdict = ModeSelection(gain=gain, queue_clears_by=clears_by)
                    if not queue:
                        verdict = verdict._replace(to=there, early=early)
                why = why or ("worth a switch" if best.mode == mode else f"{best.mode} costs less")
                why = f"{describe_gain(gain)}: {why}"
            mode_forecasts.append(msgspec.structs.replace(there, why=why))
        return verdict._replace(mode_forecasts=tuple(mode_forecasts), better_since=since)

    def _most(self, option: ModeOption) -> int:
        """The maximum count, by the mode and the budget."""
        return min(option.most, self.reach.holds(option.resources))

    def _forecast(self, option: ModeOption, price: float) -> ModeForecast:
        """The forecast of one mode, at ``price`` per replica."""
        situation, rate, most = self.situation, self.rate, self._most(option)
        least = max(option.least, min(situation.scale.min_healthy, option.most), int(rate > 0))
        unknown = ModeForecast(
            mode=option.mode, count=max(least, min(most, situation.count)), cost=self.largest * WORST, met=0.0
        )
        if not is_known(option):
            return msgspec.structs.replace(unknown, why="its speed is unknown (no engine model)")
        if most < max(1, least):
            return msgspec.structs.replace(unknown, why="the budget has no room for it")
        # If the SLO cannot be met at all, as many as keep up, as policies do.
        able = self.capabilities[option.mode]
        mu = (able.mu or able.mu_max * FULL) / (1 + min(able.error, MOST_ERROR))
        needed = math.ceil(rate / mu - 1e-9) if mu > 0 else most
        count = min(max(least, needed + situation.scale.spare), most)
        each = msgspec.structs.replace(self.workload, lam=rate / max(1, count))
        latency = latency_at(option.timing, each, situation.slo)
        missed = _missed(situation.slo, latency) if rate > 0 or count else 0.0
        return ModeForecast(
            mode=option.mode,
            count=count,
            cost=cost_of(count, price, self.largest, missed),
            met=latency.met,
            ttft_s=latency.ttft_p95_s,
            itl_s=latency.itl_p95_s,
        )

    def _objection(self, here: ModeForecast, there: ModeForecast, since: float | None) -> str:
        """Why the switch is not made now, or an empty string."""
        situation, switching = self.situation, self.situation.switching
        at, switched_at = situation.at, situation.memory.switched_at
        if since is None:
            return f"below mode.gain = {switching.gain:.0%}"
        if at - since < switching.confirm_s:
            return f"confirmed for {at - since:.0f} of {switching.confirm_s:g} s (mode.confirm_s)"
        if switched_at is not None and at - switched_at < switching.dwell_s:
            return f"the mode changed {at - switched_at:.0f} s ago, mode.dwell_s is {switching.dwell_s:g}"
        draining = "waits for a scale-down to end" if situation.supply.draining else ""
        if waits := unsettled(situation) or draining:
            return waits
        new, price = self.options[there.mode], _price(situation.mode_options)
        seen_s, switch = at - since, there.switch or self._switch_cost(there)
        dwell_s = max(switching.dwell_s, min(seen_s, LONGEST_DWELL_S))
        saved = (here.cost - there.cost) * dwell_s
        # New replicas cost during their start, and old ones while they drain beside them. While requests wait
        # for the switch, all of them miss the SLO.
        held = 0.0 if switch.gap_s else price[here.mode] * situation.supply.serving * switch.drain_s
        missed = WORST * self.largest if self.rate else 0.0
        spent = there.cost * new.lead_s + held + missed * switch.taken_s
        if saved <= spent:
            return f"saves {saved:.0f} in {dwell_s:.0f} s, less than the {spent:.0f} that the switch costs"
        # The saving, expected to last as long again, begins with the new replicas. A gap is only priced:
        # until it begins, the old replicas take short requests.
        if switch.taken_s and not switch.gap_s and seen_s < switch.start_s + switch.taken_s:
            start = f"the start of {switch.start_s:.0f} s and the {switch.taken_s:.0f} s that requests wait"
            return f"predicted for {seen_s:.0f} s, less than {start}"
        # The peak of the rate until the new replicas serve: longer than a start in this mode.
        rate = self.during(max(switch.lasts_s, 0.0 if switch.gap_s else new.lead_s))
        old, other = (RESIDUAL * self.capabilities[mode].mu_max for mode in (here.mode, there.mode))
        residual = Capacities(old, other, rate if situation.supply.serving else 0.0)
        move, keeps_up = self._switch(there), here.ttft_s is not None
        return interruption(move, residual, situation.queue_s, keeps_up=keeps_up)

    def _switch(self, there: ModeForecast) -> ModeSwitch:
        """The switch to ``there`` in the room that is free now."""
        situation = self.situation
        old, new = self.options[situation.mode], self.options[there.mode]
        demand, serving = situation.signals.demand, situation.supply.serving
        drain_s = min(demand.drain_s, situation.switching.drain_timeout_s) if demand else 0.0
        room = self.spare.plus(old.resources, serving)
        # Cores are bounded as they are, and overcommitted by the rollout.
        bounds = Resources(*map(min, self.alone, room))._replace(cpus=self.alone.cpus)
        return ModeSwitch(
            old=old,
            new=new,
            serving=serving,
            target=max(1, there.count),
            bounds=bounds,
            min_healthy=situation.scale.min_healthy,
            drain_s=drain_s,
            gap_s=self.gap_s(new),
        )

    def _switch_cost(self, there: ModeForecast) -> SwitchCost:
        """What the switch to ``there`` takes from requests."""
        demand, here = self.situation.signals.demand, self.capabilities[self.situation.mode]
        rate = 0.0 if demand is None else max(demand.arrivals.last_6_s, demand.arrivals.last_20_s)
        capacities = Capacities(here.mu_max, self.capabilities[there.mode].mu_max, rate)
        return switch_cost(self._switch(there), self.situation.signals, capacities, here.kv_tokens)

    def _queue(self, there: ModeForecast) -> tuple[str, float | None]:
        """Why the switch waits for the queue, or an empty string, and until when.

        The first prediction counts: one that has failed does not hold the switch any longer.
        """
        situation, switch = self.situation, there.switch
        if switch is None or switch.clears_s is None or not switch.delays_queue(situation.tick_s):
            return "", None
        clears_by = situation.memory.queue_clears_by
        clears_by = situation.at + switch.clears_s if clears_by is None else clears_by
        if situation.at >= clears_by:
            return "", clears_by
        after_s = switch.clears_after_s
        after = "never" if after_s is None else f"in {after_s:.0f} s"
        queue = f"the queue of {switch.queued:.0f} clears in {switch.clears_s:.0f} s in the present mode"
        return f"{queue}, {after} with a switch", clears_by

    def _freed(self, there: ModeForecast) -> ModeComparison | None:
        """The comparison once lower priorities are scaled down for the switch, if it needs that."""
        new, old = self.options[there.mode], self.options[self.situation.mode]
        room = self.alone.most(Resources().plus(new.resources, there.count))
        if room == self.alone or not is_known(new):
            return None
        more = (later - now if later < math.inf else 0.0 for later, now in zip(room, self.alone, strict=True))
        options = self.situation.mode_options
        if new.gap_s and not self._leaves_gap(old, new, room):
            without_gap = msgspec.structs.replace(new, gap_s=0.0)
            options = tuple(without_gap if option is new else option for option in options)
        situation = msgspec.structs.replace(self.situation, mode_options=options)
        spare = self.spare.plus(Resources(*more))
        return dataclasses.replace(self, situation=situation, alone=room, spare=spare)

    def _leaves_gap(self, old: ModeOption, new: ModeOption, room: Resources) -> bool:
        """Whether the first replica of ``new`` fits into ``room`` only while none serves."""
        situation, count = self.situation, max(1, new.least)
        was, key = (LayerKey(situation.model, option.mode, 0) for option in (old, new))
        goal = RolloutGoal(key=key, count=count, min_healthy=min(situation.scale.min_healthy, count))
        layers = {was: Layer(wanted=situation.supply.wanted, ready=situation.supply.serving)}
        footprints = {was: Resources(old.gpus, old.cpus), key: Resources(new.gpus, new.cpus)}
        return RolloutPlanner(goal, layers, footprints, room).needs_gap()


def _priced(options: tuple[ModeOption, ...]) -> tuple[str, dict[str, float]]:
    """The unit of cost, and the cost of one replica of each mode in it."""
    for unit, cost in (("cost", "cost_per_h"), ("GPUs", "gpus"), ("cores", "cpus")):
        prices = {option.mode: float(getattr(option, cost)) for option in options}
        if all(prices.values()) or (cost == "gpus" and any(prices.values())):
            return unit, prices
    return "replicas", dict.fromkeys((option.mode for option in options), 1.0)


def _price(options: tuple[ModeOption, ...]) -> dict[str, float]:
    """The cost of one replica of each mode, all in one unit."""
    return _priced(options)[1]


def describe_switch(situation: Situation, here: ModeForecast, there: ModeForecast) -> str:
    """What a switch from ``here`` to ``there`` is predicted to bring, and what it takes.

    The cost of a mode that misses the SLO is no price, so it is not said to be saved.
    """
    unit, price = _priced(situation.mode_options)
    now, then = (price.get(each.mode, 0.0) * each.count for each in (here, there))
    if not now or now == then:
        takes = f"for {'the same' if now else f'{then:.3g}'} {unit}"
    else:
        share = f"{then / now:.3g} times" if then > now else f"{then / now:.0%} of"
        takes = f"for {share} the {unit} ({now:.3g} -> {then:.3g})"
    met = f"({here.met:.0%} -> {there.met:.0%})"
    has_slo = situation.slo.ttft_p95_s is not None or situation.slo.itl_p95_s is not None
    if here.cost <= now * (1 + ROUNDING):
        brings = (
            f"cost {1 - there.cost / here.cost:.0%} less than {here.mode}" if here.cost else "cost no more"
        )
    elif here.ttft_s is None or not has_slo:
        keeps_up = there.ttft_s is not None
        brings = f"{'keep up with the load' if keeps_up else 'serve more'}, which {here.mode} cannot"
    elif there.cost > then * (1 + ROUNDING):
        brings = f"miss the SLO less {met}"
    else:
        brings = f"meet the SLO {met}"
    return f"{there.mode} is predicted to {brings}, {takes}"


def is_known(option: ModeOption) -> bool:
    """Whether its engine model describes the mode: the generic one is the same for every shape."""
    model = option.timing.model
    return model is not None and (option.version > 0 or model != GENERIC.model)


def _missed(slo: SloConfig, latency: ExpectedLatency) -> float:
    """The predicted miss of the SLO, as :func:`missed_by`."""
    if latency.ttft_p95_s is None or latency.itl_p95_s is None:
        return WORST * min(max(1.0, latency.utilisation), 2**CLIP) - 1
    bounds = [(latency.ttft_p95_s, slo.ttft_p95_s), (latency.itl_p95_s, slo.itl_p95_s)]
    if slo.ttft_p95_s is None and slo.itl_p95_s is None:
        bounds = [(latency.utilisation, FULL)]
    late = [(value, bound) for value, bound in bounds if bound is not None and value > bound * PRECISION]
    return missed_by(latency.met, late)


def missed_by(met: float, late: Collection[tuple[float, float]]) -> float:
    """The amount by which an SLO is missed: 0 if no 95th percentile is ``late``.

    Otherwise the fraction of requests that miss it (``met`` meet it), plus for each late percentile how often
    it has to be halved to meet its target. ``late`` are pairs of a percentile and its target.
    """
    if not late:
        return 0.0
    return 1 - met + sum(min(CLIP, math.log2(max(1.0, value / target))) for value, target in late)


def cost_of(count: int, price: float, largest: float, missed: float) -> float:
    """The cost of ``count`` replicas at ``price`` each, or that of missing the SLO.

    ``largest`` is the cost of the largest footprint of any mode, ``missed`` as of :func:`missed_by`.
    """
    return largest * (1 + missed) if missed else price * count


def measured_cost(situation: Situation) -> tuple[float, float] | None:
    """The cost of the current mode by the measured latencies, and the fraction that met the SLO.

    The same formula as that of a forecast, so that both can be compared; ``None`` without measurements.
    """
    demand, price = situation.signals.demand, _price(situation.mode_options)
    if demand is None or demand.ttft is None or situation.mode not in price:
        return None
    largest = max(price[option.mode] * max(1, option.most) for option in situation.mode_options)
    slo, met = situation.slo, demand.met
    latencies = ((demand.ttft, slo.ttft_p95_s, met.ttft), (demand.itl, slo.itl_p95_s, met.itl))
    # Fractions are counted exactly, while percentiles are interpolated between the bounds of a histogram.
    late = [
        (measured.p95, target)
        for measured, target, within in latencies
        if measured is not None and target is not None and within < PERCENTILE
    ]
    cost = cost_of(max(1, situation.count), price[situation.mode], largest, missed_by(met.both, late))
    return cost, met.both
