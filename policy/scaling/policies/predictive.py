"""The replica count forecast to meet the SLO when a replica started now is ready.

    need = max(F(t + L) + q(E(L)), margin * the rate of late, what the KV caches ask for) + queue / drain_s

in requests per second, and ``count = need / mu``: ``L`` is the measured start-up time, ``F`` a damped
forecast (:mod:`policy.scaling.forecast`), ``E`` its past errors, and ``mu`` the capacity per replica within
the SLO by the engine model, less slow replicas and the model's error, or as observed
(:mod:`policy.scaling.policies.observed_capacity`). The constants are tuned against the offline optimum on
traces, by ``tidegate bench policies``.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from policy.config.control import Seconds, Section
from policy.engine.replica_capacity import FULL, replicas_to_find_one_idle
from policy.scaling.forecast import (
    RateForecastState,
    Smoothing,
    forecast_rate,
    observed,
    shortfall,
    with_trial,
)
from policy.scaling.policies.observed_capacity import ObservedCapacity, observe_capacity, sustained
from policy.scaling.policies.rounding import decode_state, encode_state, is_usable, per_replica, whole
from policy.scaling.policies.token_saturation import learned, saturation, with_mode
from policy.scaling.view import Proposal, View
from policy.signals.types import ModelDemand, Rates

# The utilisation without an SLO: queues grow without bound near 1.
LOADED = 0.85
# The largest error of the engine model that adds headroom.
MOST_ERROR = 0.5
# The least capacity of a slow replica, as a fraction of its shape.
SLOWEST = 0.2
# With start-up times up to this, jumps of the rate are answered at once; with longer ones most bursts would
# be over before a replica is ready.
QUICK_S = 20.0
# A capacity within the SLO below this part of the saturation rate says that the SLO is near the latencies of
# an idle replica.
NEAR_IDLE = 0.25
# The least probability with which an arrival may find all replicas occupied.
LEAST_BUSY = 1e-3
# A rise counts beyond this many standard deviations of chance.
BY_CHANCE = 0.3
# The longest forecast horizon.
LONGEST_S = 3600.0
# A removed replica that is needed again within this time should have stayed.
SOON_S = 600.0
# The spare capacity required for a scale-down, in replicas: added each time, at most, and its decay time.
EACH = 0.2
MOST = 0.6
FADES_S = 1800.0


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

    def decayed(self, at: float, mode: str, count: int) -> ScaleDownDamping:
        """The state at ``at``, with the present ``count``; a new one for another mode."""
        if self.mode != mode:
            return ScaleDownDamping(at, mode, count)
        spare = self.spare * math.exp(-max(0.0, at - self.at) / FADES_S)
        return ScaleDownDamping(at, mode, count, spare, at if count < self.count else self.fell_at)

    def after_scale_up(self) -> ScaleDownDamping:
        """The state after a scale-up: one soon after a scale-down needs more spare capacity next time."""
        if not 0.0 <= self.at - self.fell_at < SOON_S:
            return self
        return msgspec.structs.replace(self, spare=min(MOST, self.spare + EACH), fell_at=0.0)


class PredictiveState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rates so far, ``k2`` by mode, the scale-down damping, and the observed capacity.

    No field has a default, so that the state of ``token_saturation``, which has only ``k2``, is refused.
    """

    series: RateForecastState | None
    k2: dict[str, float]
    reluctance: ScaleDownDamping | None
    proof: ObservedCapacity | None


class Predictive(Section, frozen=True):
    """The policy, ahead of the load by the start-up time.

    The count covers ``quantile`` of the forecast errors, and ``margin`` times the rate of the last 20 s.

    A backlog that a start can still help with is cleared in ``drain_s``. A replica is removed if the others
    are then loaded to at most ``down`` of their capacity, and replicas are loaded to at most ``full`` of
    their saturation rate. ``level_s`` and ``trend_s`` are the smoothing times of level and trend, ``lasts_s``
    the decay time of a trend.
    """

    quantile: Annotated[float, Meta(ge=0.5, le=0.999)] = 0.9
    margin: Annotated[float, Meta(ge=1, le=10)] = 1.06
    drain_s: Seconds = 15.0
    down: Annotated[float, Meta(ge=0.1, le=1)] = 1.0
    full: Annotated[float, Meta(ge=0.1, le=1)] = FULL
    level_s: Seconds = 30.0
    trend_s: Seconds = 60.0
    lasts_s: Seconds = 200.0

    @property
    def _smoothing(self) -> Smoothing:
        return Smoothing(self.level_s, self.trend_s, self.lasts_s)

    def decide(self, view: View, memory: Any) -> Proposal:
        """The largest term plus the backlog; a scale-down only while no replica starts."""
        demand, mode = view.signals.demand, view.mode
        known = decode_state(memory, PredictiveState)
        if demand is None:
            return view.hold(encode_state(known), "no gateway has reported")
        before = known or PredictiveState(None, {}, None, None)
        series, forecast, high = self._forecast(view, demand, before.series)
        damping = before.reluctance or ScaleDownDamping(view.at, mode, view.count)
        damping = damping.decayed(view.at, mode, view.count)
        # The capacity as observed before this view: the present load must not lower its own need.
        mu = sustained(before.proof, view, capacity(view), self.full)
        k2 = before.k2.get(mode)
        left = PredictiveState(
            series,
            with_mode(before.k2, mode, learned(view, k2)),
            damping,
            observe_capacity(before.proof, view, mu),
        )
        full = saturation(view, k2, queued=False)
        if not mu and full is None:
            return view.hold(encode_state(left), "the capacity of a replica is unknown")
        recent = self.margin * is_usable(demand.arrivals.last_20_s)
        terms = {
            "forecast": useful(per_replica(high, mu), high, view),
            "recent": useful(per_replica(recent, mu), recent, view),
            "tokens": full.replicas / self.full if full is not None else 0.0,
        }
        most = max(terms, key=lambda term: terms[term])
        need = terms[most]
        # One request after the other is within an SLO near the latencies of an idle replica.
        drain = max(mu, 1.0 / view.idle.e2e_s) if view.idle and _near_idle(view) else mu
        behind = _backlog(view, demand, drain)
        if behind:
            terms["queue"] = per_replica(behind / self.drain_s, drain)
            need += terms["queue"]
        if behind and _late(view, demand) and not (view.idle and view.idle.missed(view.slo)):
            terms["late"] = useful(view.supply.serving + 1.0, recent, view)
            if terms["late"] > need:
                most, need = "late", terms["late"]
        if whole(need) > view.count:
            left = msgspec.structs.replace(left, reluctance=damping.after_scale_up())
        count = self._changed(view, need, damping.spare)
        return Proposal(
            count=view.within(count),
            reason=_describe(most, terms[most], view, high) + (f", {demand.queued} queued" if behind else ""),
            terms=terms,
            forecast=forecast,
            forecast_high=high,
            memory=encode_state(left),
            unbounded=view.unbounded(count),
        )

    def _forecast(
        self, view: View, demand: ModelDemand, series: RateForecastState | None
    ) -> tuple[RateForecastState, float, float]:
        """The rates so far, and the forecast for the end of a start with its upper bound."""
        lead_s = min(max(view.lead_s, view.tick_s, 1.0), LONGEST_S)
        elapsed_s = 0.0 if series is None else view.at - series.at
        newest, over_s = _newest(demand.arrivals, elapsed_s)
        jumps = over_s if lead_s <= QUICK_S else 0.0
        series = observed(series, view.at, newest, self._smoothing, jumps)
        forecast = 0.0 if view.is_idle else is_usable(self._ahead(series, lead_s))
        # The level, since a mean of the last minute is half a minute late.
        series = with_trial(series, is_usable(series.level), lead_s, forecast)
        return series, forecast, is_usable(forecast + shortfall(series, self.quantile, forecast))

    def _ahead(self, series: RateForecastState, lead_s: float) -> float:
        """The rate in ``lead_s`` seconds, with the significant part of a rise."""
        rise = forecast_rate(series, lead_s, self._smoothing) - series.level
        level_s, trend_s = self._smoothing.level_s, self._smoothing.trend_s
        # With Poisson arrivals the level has a variance of rate / (2 level_s).
        chance = math.sqrt(max(0.0, series.level) / (2 * level_s)) * lead_s / math.sqrt(level_s * trend_s)
        return series.level + max(0.0, rise - BY_CHANCE * chance)

    def _changed(self, view: View, need: float, spare: float) -> int:
        """The count for ``need``: up at once, down if the rest has ``spare`` replicas of capacity left."""
        if whole(need) >= view.count:
            return whole(need)
        if view.supply.starting_s:
            return view.count
        return min(view.count, whole(need / self.down + (spare if need else 0.0)))


def capacity(view: View) -> float:
    """``mu``: the present capacity of one replica within the SLO, in requests per second; 0 if unknown.

    If the SLO cannot be met at all, it is a fraction of the saturation rate.
    """
    capability = view.capability
    promised = view.slo.ttft_p95_s is not None or view.slo.itl_p95_s is not None
    mu = is_usable(capability.mu) if promised else 0.0
    mu = mu or is_usable(capability.mu_max) * LOADED
    paces = [_pace(replica.slowness) for replica in view.signals.replicas]
    if paces:
        mu *= sum(paces) / len(paces)
    return mu / (1.0 + min(is_usable(capability.error), MOST_ERROR))


def useful(replicas: float, rate: float, view: View) -> float:
    """At most as many ``replicas`` as let almost every arrival find an idle one: more meet the SLO no better.

    With an SLO near the latencies of an idle replica, the capacity of one goes to 0, and the count without
    this bound to infinity.
    """
    if view.idle is None or not _near_idle(view):
        return replicas
    # A replica that decodes is not idle.
    load = rate * view.idle.e2e_s
    # Erlang's recursion takes more than ``load`` steps.
    if replicas <= load or load >= view.most:
        return replicas
    return min(replicas, float(replicas_to_find_one_idle(load, max(1.0 - view.slo.attainment, LEAST_BUSY))))


def _near_idle(view: View) -> bool:
    """Whether the SLO is near the latencies of an idle replica."""
    return view.capability.mu < NEAR_IDLE * view.capability.mu_max


def _pace(slowness: float) -> float:
    return min(max(1.0 / slowness, SLOWEST), 1.0) if slowness > 0 else 1.0


def _newest(rates: Rates, elapsed_s: float) -> tuple[float, float]:
    """The longest mean of arrivals since the last view, and its seconds."""
    if elapsed_s >= 60.0:
        return is_usable(rates.last_60_s), 60.0
    return (is_usable(rates.last_20_s), 20.0) if elapsed_s >= 20.0 else (is_usable(rates.last_6_s), 6.0)


def _backlog(view: View, demand: ModelDemand, mu: float) -> float:
    """How many requests would wait when a replica started now is ready; 0 if none waits now."""
    waiting = is_usable(demand.queued + sum(replica.waiting for replica in view.signals.replicas))
    if not waiting:
        return 0.0
    lead_s, rate = is_usable(view.lead_s), is_usable(demand.arrivals.last_20_s)
    grown = (rate - view.supply.serving * mu) * lead_s
    grown -= sum(mu * max(0.0, lead_s - is_usable(ready_s)) for ready_s in view.supply.starting_s)
    if lead_s > view.queue_s:
        # Requests leave after queue_s, so only the latest arrivals still wait then.
        ready = view.supply.serving + sum(ready_s < lead_s for ready_s in view.supply.starting_s)
        grown = min(grown, (rate - ready * mu) * view.queue_s)
    return is_usable(waiting + grown)


def _late(view: View, demand: ModelDemand) -> bool:
    limit_s = view.slo.ttft_p95_s
    return limit_s is not None and demand.ttft is not None and demand.ttft.p95 > limit_s


def _describe(most: str, replicas: float, view: View, high: float) -> str:
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
