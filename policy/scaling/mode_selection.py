"""Which mode: the predicted cost of each with the replica count that it needs, and when to switch.

A rung that meets the objective costs the GPUs (or cores, or money, where prices are given) of the replicas it
needs. One that misses it costs the largest footprint of any rung, times one and what it misses: so more than
any that meets it, and of two that miss the worse one more. One that cannot keep up costs ten such
footprints, times the rate over what it can carry. Without an objective a rung meets it while it is
no fuller than :data:`policy.engine.replica_capacity.FULL`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import msgspec

from policy.config.control import SloConfig
from policy.engine.performance_model import Workload
from policy.engine.prefill_estimate import GENERIC
from policy.engine.replica_capacity import FULL, Capability, ExpectedLatency, latency_at
from policy.scaling.budget_allocation import Allocation, each
from policy.scaling.decision_types import ModeForecast, ModeOption, Situation
from policy.scaling.forecast import likely
from policy.scaling.guardrails import metrics_stale, unsettled
from policy.scaling.rollout import Footprint, Goal, Layer, LayerKey, needs_gap

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
# What has promised a gain for some time is expected to do so as long again, up to an hour: so who waits until
# a switch pays loses at most as much again as who knew.
LONGEST_DWELL_S = 3600.0


class Candidate(NamedTuple):
    """The inputs of a comparison of modes.

    ``rate`` requests per second are expected, of ``workload``, and while a switch of so many seconds lasts no
    more than ``during`` says in 19 of 20. ``reach`` is what the model could hold in all, ``alone`` while
    nobody makes way for it, ``spare`` what nobody holds. ``fixed`` says why no mode is worth a switch,
    whatever it promises.
    """

    rate: float
    during: Callable[[float], float]
    workload: Workload
    capabilities: Mapping[str, Capability]
    reach: Allocation
    alone: Allocation
    spare: Allocation
    fixed: str = ""


class Verdict(NamedTuple):
    """What came of the comparison: where ``to`` go, if anywhere, and the ``gain`` that this promises.

    ``early`` says that it is worth it only once a lower priority has made way.
    """

    outlooks: tuple[ModeForecast, ...] = ()
    better_since: dict[str, float] = {}
    to: ModeForecast | None = None
    gain: float | None = None
    early: bool = False


def expected(situation: Situation, foreseen: float, able: Capability) -> float:
    """Requests per second that a mode would have to serve, with those that wait.

    As many as those that serve can, each as ``able``, while nobody has told: who changes the mode by hand
    then loses none of it.
    """
    demand = situation.signals.demand
    if demand is None:
        return situation.supply.serving * (able.mu or able.mu_max * FULL)
    return foreseen + demand.queued / DRAIN_S


def expected_peak(situation: Situation, able: Capability, seconds: float) -> float:
    """As :func:`expected`, the most that may come over so many seconds, whatever the policy foresees."""
    demand = situation.signals.demand
    return expected(situation, likely(demand.arrivals, seconds, DURING) if demand else 0.0, able)


def forecasts(situation: Situation, prospect: Candidate) -> dict[str, ModeForecast]:
    """The forecast of each mode, with the replicas that it needs and the budget allows."""
    whole, price = whole_of(situation, prospect), _price(situation.rungs)
    return {
        rung.mode: _outlook(situation, rung, prospect, price[rung.mode], whole) for rung in situation.rungs
    }


def whole_of(situation: Situation, prospect: Candidate) -> float:
    """The cost of the largest footprint of any mode."""
    price = _price(situation.rungs)
    return max(price[rung.mode] * max(1, _most(rung, prospect)) for rung in situation.rungs)


def evaluate(situation: Situation, prospect: Candidate) -> Verdict:
    """Compare all modes; the verdict has the switch to make, if any."""
    seen = forecasts(situation, prospect)
    here = seen[situation.mode]
    known = [outlook for outlook in seen.values() if not outlook.why]
    best = min(known, key=lambda outlook: (outlook.cost, outlook.mode != situation.mode), default=here)
    unseen = metrics_stale(situation)
    since: dict[str, float] = {}
    told: dict[str, ModeForecast] = {}
    verdict = Verdict()
    for mode, outlook in seen.items():
        why = outlook.why
        gain = 1 - outlook.cost / here.cost if here.cost else 0.0
        if mode == situation.mode:
            why = why or "the current mode"
        elif prospect.fixed or unseen:
            why = why or prospect.fixed or unseen
        elif not why:
            # What has no room any more is left for what has; of what is not known nothing can be said.
            why = "" if is_known(_rung(situation, here.mode)) else f"{here.mode}: {here.why}"
            if not why and gain >= situation.switching.gain:
                since[mode] = situation.memory.better_since.get(mode, situation.at)
            why = why or _objection(situation, prospect, here, outlook, since.get(mode))
            freed = _freed(situation, prospect, outlook) if why and best.mode == mode else None
            early = freed is not None and not _objection(*freed, here, outlook, since.get(mode))
            if best.mode == mode and (early or not why):
                verdict = Verdict(to=outlook, gain=gain, early=early)
            why = why or ("worth a switch" if best.mode == mode else f"{best.mode} costs less")
            why = f"gain {gain:.0%}: {why}"
        told[mode] = msgspec.structs.replace(outlook, why=why)
    return verdict._replace(outlooks=tuple(told.values()), better_since=since)


def _price(rungs: tuple[ModeOption, ...]) -> dict[str, float]:
    """The cost of one replica of each mode, all in one unit."""
    for cost in ("cost_per_h", "gpus", "cpus"):
        prices = {rung.mode: float(getattr(rung, cost)) for rung in rungs}
        if all(prices.values()) or (cost == "gpus" and any(prices.values())):
            return prices
    return dict.fromkeys((rung.mode for rung in rungs), 1.0)


def _most(rung: ModeOption, prospect: Candidate) -> int:
    """The maximum count, by the mode and the budget."""
    return min(rung.most, prospect.reach.holds(each(rung)))


def _outlook(
    situation: Situation, rung: ModeOption, prospect: Candidate, price: float, whole: float
) -> ModeForecast:
    """The forecast of one mode, at ``price`` per replica."""
    able, rate, most = prospect.capabilities[rung.mode], prospect.rate, _most(rung, prospect)
    least = max(rung.least, min(situation.scale.min_healthy, rung.most), int(rate > 0))
    unknown = ModeForecast(
        mode=rung.mode, count=max(least, min(most, situation.count)), cost=whole * WORST, met=0.0
    )
    if not is_known(rung):
        return msgspec.structs.replace(unknown, why="its speed is unknown (no engine model)")
    if most < max(1, least):
        return msgspec.structs.replace(unknown, why="the budget has no room for it")
    # Where the objective cannot be met at all, as many as keep up: the same that a policy would ask for.
    mu = (able.mu or able.mu_max * FULL) / (1 + min(able.error, MOST_ERROR))
    needed = math.ceil(rate / mu - 1e-9) if mu > 0 else most
    count = min(max(least, needed), most)
    alone = msgspec.structs.replace(prospect.workload, lam=rate / max(1, count))
    found = latency_at(rung.timing, alone, situation.slo)
    missed = _missed(situation.slo, found) if rate > 0 or count else 0.0
    return ModeForecast(
        mode=rung.mode,
        count=count,
        cost=cost_of(count, price, whole, missed),
        met=found.met,
        ttft_s=found.ttft_p95_s,
        itl_s=found.itl_p95_s,
    )


def is_known(rung: ModeOption) -> bool:
    """Whether its engine model says anything of it: the generic one is the same for every shape."""
    return rung.timing.model is not None and (rung.version > 0 or rung.timing.model != GENERIC.model)


def _missed(slo: SloConfig, found: ExpectedLatency) -> float:
    """By how much the SLO is missed; 0 where it is met."""
    if found.ttft_p95_s is None or found.itl_p95_s is None:
        return WORST * min(max(1.0, found.utilisation), 2**CLIP) - 1
    bounds = [(found.ttft_p95_s, slo.ttft_p95_s), (found.itl_p95_s, slo.itl_p95_s)]
    if slo.ttft_p95_s is None and slo.itl_p95_s is None:
        bounds = [(found.utilisation, FULL)]
    late = [(value, bound) for value, bound in bounds if bound is not None and value > bound * PRECISION]
    return missed_by(found.met, late)


def missed_by(met: float, late: Collection[tuple[float, float]]) -> float:
    """By how much an SLO is missed: 0 where no 95th percentile is ``late``.

    Otherwise the fraction of requests that miss it (``met`` is that of the others), plus how many times each
    late percentile has to be halved to be in time. ``late`` are pairs of a percentile and its target.
    """
    return 1 - met + sum(_halvings(value, target) for value, target in late) if late else 0.0


def cost_of(count: int, price: float, largest: float, missed: float) -> float:
    """The cost of ``count`` replicas at ``price`` each, or that of missing the SLO.

    ``largest`` is the cost of the largest footprint of any mode, ``missed`` as of :func:`missed_by`.
    """
    return largest * (1 + missed) if missed else price * count


def measured_cost(situation: Situation) -> tuple[float, float] | None:
    """The cost of the present mode by the latencies that were measured, and the fraction that met the SLO.

    The same formula as that of a forecast, so that both can be compared; ``None`` without measurements.
    """
    demand, price = situation.signals.demand, _price(situation.rungs)
    if demand is None or demand.ttft is None or situation.mode not in price:
        return None
    largest = max(price[rung.mode] * max(1, rung.most) for rung in situation.rungs)
    slo, met = situation.slo, demand.met
    latencies = ((demand.ttft, slo.ttft_p95_s, met.ttft), (demand.itl, slo.itl_p95_s, met.itl))
    # Fractions are counted exactly, while percentiles are interpolated between the bounds of a histogram.
    late = [
        (seen.p95, target)
        for seen, target, within in latencies
        if seen is not None and target is not None and within < PERCENTILE
    ]
    missed = missed_by(met.both, late)
    return cost_of(max(1, situation.count), price[situation.mode], largest, missed), met.both


def _halvings(value: float, target: float) -> float:
    return min(CLIP, math.log2(max(1.0, value / target)))


def _objection(
    situation: Situation, prospect: Candidate, here: ModeForecast, there: ModeForecast, since: float | None
) -> str:
    """Why the switch is not made now, or an empty string."""
    at, switching, switched_at = situation.at, situation.switching, situation.memory.switched_at
    if since is None:
        return f"below mode.gain = {switching.gain:.0%}"
    if at - since < switching.confirm_s:
        return f"confirmed for {at - since:.0f} of {switching.confirm_s:g} s (mode.confirm_s)"
    lasted_s = math.inf if switched_at is None else at - switched_at
    if lasted_s < switching.dwell_s:
        return f"the mode changed {lasted_s:.0f} s ago, mode.dwell_s is {switching.dwell_s:g}"
    if waits := unsettled(situation) or (
        "waits for a scale-down to end" if situation.supply.draining else ""
    ):
        return waits
    new = _rung(situation, there.mode)
    dwell_s = max(switching.dwell_s, min(at - since, LONGEST_DWELL_S))
    gained = (here.cost - there.cost) * dwell_s
    # While it starts it is paid for and serves nobody; while nobody serves, everything is missed.
    missed = WORST * whole_of(situation, prospect) if prospect.rate else 0.0
    spent = there.cost * new.lead_s + missed * new.gap_s
    if gained <= spent:
        return f"saves {gained:.0f} in {dwell_s:.0f} s, less than the {spent:.0f} that the switch costs"
    return _interrupted(situation, prospect, here, there)


def _freed(
    situation: Situation, prospect: Candidate, there: ModeForecast
) -> tuple[Situation, Candidate] | None:
    """The same once those of a lower priority have made way for the switch; ``None`` where they need not."""
    new, old = _rung(situation, there.mode), _rung(situation, situation.mode)
    needs = Allocation().plus(each(new), there.count)
    room = prospect.alone.most(needs)
    if room == prospect.alone or not is_known(new):
        return None
    more = Allocation(*(_less(later, now) for later, now in zip(room, prospect.alone, strict=True)))
    rungs = situation.rungs
    if new.gap_s and not _leaves_a_gap(situation, old, new, room):
        rungs = tuple(msgspec.structs.replace(rung, gap_s=0.0) if rung is new else rung for rung in rungs)
    freed = prospect._replace(spare=prospect.spare.plus(more))
    return msgspec.structs.replace(situation, rungs=rungs), freed


def _less(later: float, now: float) -> float:
    """What is added; 0 where it is unbounded."""
    return later - now if later < math.inf else 0.0


def _leaves_a_gap(situation: Situation, old: ModeOption, new: ModeOption, room: Allocation) -> bool:
    """Whether a first replica of ``new`` can be had in that room only while nobody serves."""
    keys = {mode: LayerKey(situation.model, mode, 0) for mode in (old.mode, new.mode)}
    footprints = {keys[rung.mode]: Footprint(gpus=rung.gpus, cpus=rung.cpus) for rung in (old, new)}
    count = max(1, new.least)
    goal = Goal(key=keys[new.mode], count=count, min_healthy=min(situation.scale.min_healthy, count))
    layers = {keys[old.mode]: Layer(wanted=situation.supply.wanted, ready=situation.supply.serving)}
    bounds = (None if bound == math.inf else int(bound) for bound in room[:2])
    return needs_gap(goal, layers, footprints, *bounds)


def _interrupted(situation: Situation, prospect: Candidate, here: ModeForecast, there: ModeForecast) -> str:
    """Why requests would be unserved during the switch, or an empty string.

    Where the present mode keeps up, what serves meanwhile has to as well. Where it does not, requests wait in
    any case: so they may then, while the queue can hold them. The rate is what may come until the new ones
    are ready, which may take another time than a start in the present mode.
    """
    new, old = _rung(situation, there.mode), _rung(situation, here.mode)
    lasts_s = new.gap_s or new.lead_s
    rate, serving, spare = prospect.during(lasts_s), situation.supply.serving, prospect.spare
    beside = spare.holds(each(new))
    if not serving or not rate or (not new.gap_s and beside >= there.count):
        return ""
    carried = 0.0
    if not new.gap_s:
        # What fits beside the others comes first; then half of those go, or as many as one more needs.
        gone = serving - serving // 2
        while gone < serving and not spare.plus(each(old), gone).holds(each(new)):
            gone += 1
        able = prospect.capabilities
        carried = RESIDUAL * (beside * able[new.mode].mu_max + (serving - gone) * able[old.mode].mu_max)
    if rate <= carried:
        return ""
    waits_s = lasts_s * (1 - carried / rate)
    if waits_s <= situation.queue_s and (new.gap_s or here.ttft_s is None):
        return ""
    return (
        f"{carried:.2f} of {rate:.2f} req/s can be served during the switch: others wait for {waits_s:.0f} s"
    )


def _rung(situation: Situation, mode: str) -> ModeOption:
    return next(rung for rung in situation.rungs if rung.mode == mode)
