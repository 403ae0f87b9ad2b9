"""As many replicas as the load will need when one that is started now is ready.

    need = max(F(t + L) + q(E(L)), margin * the rate of late, what the KV caches ask for) + queue / drain_s

in requests per second, and ``count = need / mu``: ``L`` is how long a start takes as measured, ``F`` a damped
forecast (:mod:`policy.scaling.forecast`), ``E`` what such forecasts were short of, and ``mu`` what the engine
model says that a replica takes within the objective, less what slow replicas and the model's own error take
off, or what many together are seen to take (:mod:`policy.scaling.policies.observed_capacity`). The constants
are tuned against plans that know the future, on traces, by ``tidegate bench policies``.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from policy.config.control import Seconds, Section
from policy.engine.capacity import FULL
from policy.scaling.forecast import Series, Smoothing, ahead, observed, shortfall, tried
from policy.scaling.policies.observed_capacity import ObservedCapacity, observe_capacity, sustained
from policy.scaling.policies.rounding import decode_state, encode_state, is_usable, per_replica, whole
from policy.scaling.policies.token_saturation import learned, remembered, saturation
from policy.scaling.view import Proposal, View
from policy.signals.types import Demand, Rates

# Without an objective a replica is loaded so far: its queue grows without bound as it nears all.
LOADED = 0.85
# A model that is off by more than this is not mended by headroom.
MOST_ERROR = 0.5
# A replica is not counted for less than this of its shape, nor for more than all.
SLOWEST = 0.2
# Where a start takes no longer, a jump of the rate is answered before the mean of 20 s has it. Where it takes
# longer most bursts are over by then, and to run after each costs more than it serves.
QUICK_S = 20.0
# A rise of the rate counts beyond so many standard deviations of what chance makes.
BY_CHANCE = 0.3
# No start is foreseen further.
LONGEST_S = 3600.0
# A rate as small as this is nobody.
_NOBODY = 1e-6
# A removed replica that is needed again within this time should have stayed.
SOON_S = 600.0
# The spare capacity required for a scale-down, in replicas: added each time, at most, and its decay time.
EACH = 0.2
MOST = 0.6
FADES_S = 1800.0


class PredictiveParameters(Section, frozen=True):
    """How careful it is, and how it looks ahead.

    ``quantile`` of the forecasts turn out no further short than what stands by for it. ``margin`` times
    the rate of the last 20 s is served in any case. A backlog that a start can still help with is worked off
    in ``drain_s``. A replica is given up when the others would then be loaded to ``down`` at most, of what
    they take within the objective. Together they are given at most ``full`` of what they keep up with by the
    model, however well they do. A new level of the rate is believed in ``level_s``, a new trend in
    ``trend_s``, and a trend lasts for ``lasts_s``.
    """

    quantile: Annotated[float, Meta(ge=0.5, le=0.999)] = 0.9
    margin: Annotated[float, Meta(ge=1, le=10)] = 1.06
    drain_s: Seconds = 15.0
    down: Annotated[float, Meta(ge=0.1, le=1)] = 1.0
    full: Annotated[float, Meta(ge=0.1, le=1)] = FULL
    level_s: Seconds = 30.0
    trend_s: Seconds = 60.0
    lasts_s: Seconds = 200.0


class ScaleDownDamping(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Adaptive hysteresis: a scale-down needs ``spare`` replicas of capacity left over.

    It grows each time that a removed replica is needed again soon, as happens by chance near the threshold
    of a count, and decays. ``fell_at`` is when the count last fell (0: taken back, or never).
    """

    at: float
    mode: str
    count: int
    spare: float = 0.0
    fell_at: float = 0.0


def observe_demand(before: ScaleDownDamping | None, at: float, mode: str, count: int) -> ScaleDownDamping:
    """The state decayed to ``at``; a new one for another mode."""
    if before is None or before.mode != mode:
        return ScaleDownDamping(at, mode, count)
    spare = before.spare * math.exp(-max(0.0, at - before.at) / FADES_S)
    return ScaleDownDamping(at, mode, count, spare, at if count < before.count else before.fell_at)


def rising(now: ScaleDownDamping) -> ScaleDownDamping:
    """The state after a scale-up."""
    if not 0.0 <= now.at - now.fell_at < SOON_S:
        return now
    return msgspec.structs.replace(now, spare=min(MOST, now.spare + EACH), fell_at=0.0)


class PredictiveState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one decision leaves to the next: the rates that came, and where the KV caches of a mode filled.

    Also how reluctantly replicas are given up.
    """

    series: Series
    k2: dict[str, float] = {}
    reluctance: ScaleDownDamping | None = None
    proof: ObservedCapacity | None = None


class Predictive:
    """Ahead of the load by the time that a start takes."""

    def __init__(self, parameters: PredictiveParameters) -> None:
        self._parameters = parameters
        self._smoothing = Smoothing(parameters.level_s, parameters.trend_s, parameters.lasts_s)

    def decide(self, view: View, memory: Any) -> Proposal:
        """What the term that asks for the most asks for, and the backlog; fewer only when nothing starts."""
        demand = view.signals.demand
        before = decode_state(memory, PredictiveState)
        if demand is None:
            return view.hold(encode_state(before), "no gateway has reported")
        series, forecast, high = self._foreseen(view, demand, None if before is None else before.series)
        k2 = {} if before is None else before.k2
        mode = view.mode
        reluctance = observe_demand(None if before is None else before.reluctance, view.at, mode, view.count)
        left = PredictiveState(series, remembered(k2, mode, learned(view, k2.get(mode))), reluctance)
        # As proved before this view: what comes now shall not lower what it asks for.
        proof = None if before is None else before.proof
        mu = sustained(proof, view, capacity(view), self._parameters.full)
        left = msgspec.structs.replace(left, proof=observe_capacity(proof, view, mu))
        full = saturation(view, k2.get(mode), queued=False)
        if not mu and full is None:
            return view.hold(encode_state(left), "the capacity of a replica is unknown")
        terms = {
            "forecast": per_replica(high, mu),
            "recent": per_replica(self._parameters.margin * is_usable(demand.arrivals.last_20_s), mu),
            "tokens": full.replicas / self._parameters.full if full is not None else 0.0,
        }
        most = max(terms, key=lambda term: terms[term])
        need = terms[most]
        behind = _backlog(view, demand, mu)
        if behind:
            terms["queue"] = per_replica(behind / self._parameters.drain_s, mu)
            need += terms["queue"]
        if behind and _late(view, demand):
            terms["late"] = view.supply.serving + 1.0
            if terms["late"] > need:
                most, need = "late", terms["late"]
        if whole(need) > view.count:
            left = msgspec.structs.replace(left, reluctance=rising(reluctance))
        return Proposal(
            count=view.within(self._changed(view, need, reluctance.spare)),
            reason=_said(most, terms[most], view, high) + (f", {demand.queued} queued" if behind else ""),
            terms=terms,
            forecast=forecast,
            forecast_high=high,
            memory=encode_state(left),
        )

    def _foreseen(self, view: View, demand: Demand, series: Series | None) -> tuple[Series, float, float]:
        """The rates so far, the one expected when a start is over, and what it may be at most."""
        lead_s = min(max(view.lead_s, view.tick_s, 1.0), LONGEST_S)
        elapsed_s = 0.0 if series is None else view.at - series.at
        newest, over_s = _newest(demand.arrivals, elapsed_s)
        jumps = over_s if lead_s <= QUICK_S else 0.0
        series = observed(series, view.at, newest, self._smoothing, jumps)
        deserted = demand.arrivals.last_60_s <= _NOBODY and not view.has_demand
        forecast = 0.0 if deserted else is_usable(self._ahead(series, lead_s))
        # Against the level, for a mean of the last minute is half a minute late.
        series = tried(series, is_usable(series.level), lead_s, forecast)
        return series, forecast, is_usable(forecast + shortfall(series, self._parameters.quantile, forecast))

    def _ahead(self, series: Series, lead_s: float) -> float:
        """The rate in so many seconds, with as much of a rise as chance does not make."""
        rise = ahead(series, lead_s, self._smoothing) - series.level
        level_s, trend_s = self._smoothing.level_s, self._smoothing.trend_s
        # Of requests that come each for itself the level has a variance of the rate over 2 level_s.
        chance = math.sqrt(max(0.0, series.level) / (2 * level_s)) * lead_s / math.sqrt(level_s * trend_s)
        return series.level + max(0.0, rise - BY_CHANCE * chance)

    def _changed(self, view: View, need: float, spare: float) -> int:
        """The count for so many: up at once, down when the rest can take it and nothing is on its way.

        And when the rest has ``spare`` parts of a replica left; who is deserted needs none of them.
        """
        if whole(need) >= view.count:
            return whole(need)
        if view.supply.starting_s:
            return view.count
        return min(view.count, whole(need / self._parameters.down + (spare if need else 0.0)))


def capacity(view: View) -> float:
    """``mu``: the requests per second that one replica takes within the objective, as they are now.

    Where the objective cannot be met at all it is what a replica keeps up with; 0 where nothing is known.
    """
    capability = view.capability
    promised = view.slo.ttft_p95_s is not None or view.slo.itl_p95_s is not None
    mu = is_usable(capability.mu) if promised else 0.0
    mu = mu or is_usable(capability.mu_max) * LOADED
    paces = [_pace(replica.slowness) for replica in view.signals.replicas]
    if paces:
        mu *= sum(paces) / len(paces)
    return mu / (1.0 + min(is_usable(capability.error), MOST_ERROR))


def _pace(slowness: float) -> float:
    return min(max(1.0 / slowness, SLOWEST), 1.0) if slowness > 0 else 1.0


def _newest(rates: Rates, elapsed_s: float) -> tuple[float, float]:
    """The longest mean of arrivals that has nothing in it of what was seen before, and its seconds."""
    if elapsed_s >= 60.0:
        return is_usable(rates.last_60_s), 60.0
    return (is_usable(rates.last_20_s), 20.0) if elapsed_s >= 20.0 else (is_usable(rates.last_6_s), 6.0)


def _backlog(view: View, demand: Demand, mu: float) -> float:
    """Of requests that wait, and those to come, how many would wait when a start begun now is over.

    0 if nobody waits, or those that serve and start work it off before: then a start would come too late.
    """
    waiting = is_usable(demand.queued + sum(replica.waiting for replica in view.signals.replicas))
    if not waiting:
        return 0.0
    lead_s, rate = is_usable(view.lead_s), is_usable(demand.arrivals.last_20_s)
    grown = (rate - view.supply.serving * mu) * lead_s
    grown -= sum(mu * max(0.0, lead_s - is_usable(ready_s)) for ready_s in view.supply.starting_s)
    if lead_s > view.queue_s:
        # Of those to come only the last wait still when it is over: the others have given up.
        ready = view.supply.serving + sum(ready_s < lead_s for ready_s in view.supply.starting_s)
        grown = min(grown, (rate - ready * mu) * view.queue_s)
    return is_usable(waiting + grown)


def _late(view: View, demand: Demand) -> bool:
    limit_s = view.slo.ttft_p95_s
    return limit_s is not None and demand.ttft is not None and demand.ttft.p95 > limit_s


def _said(most: str, replicas: float, view: View, high: float) -> str:
    """One short sentence on the term that asks for the most."""
    if not replicas:
        return "no requests"
    need = f"need {replicas:.3g} replicas"
    return {
        "forecast": f"up to {high:.3g} req/s forecast in {view.lead_s:.0f} s {need}",
        "recent": f"requests of the last 20 s {need}",
        "tokens": f"tokens in KV caches {need}",
        "late": f"late first tokens {need}",
    }[most]
