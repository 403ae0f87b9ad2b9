"""As many replicas as the load will need when one that is started now is ready.

    need = max(F(t + L) + q(E(L)), margin * the rate of late, what the KV caches ask for) + queue / drain_s

in requests per second, and ``count = need / mu``: ``L`` is how long a start takes as measured, ``F`` a damped
forecast (:mod:`policy.forecast`), ``E`` what such forecasts were short of, and ``mu`` what the engine model
says that a replica takes within the objective, less what slow replicas and the model's own error take off.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from policy.forecast import Series, Smoothing, ahead, observed, shortfall, tried
from policy.scaling.counting import blind, per_replica, recalled, sane, whole, within
from policy.scaling.token_saturation import learned, saturation
from policy.scaling.view import Proposal, View
from policy.section import Seconds, Section
from policy.signals import Demand, Rates

# Without an objective a replica is loaded so far: its queue grows without bound as it nears all.
_LOADED = 0.85
# The engine model may be off by more than this: then its predictions are not what helps.
_MOST_ERROR = 0.5


class PredictiveParameters(Section, frozen=True):
    """How careful it is, and how it looks ahead.

    Of forecasts, ``quantile`` turn out too low by less than what is kept ready for: the higher, the more
    stand by. ``margin`` times the rate of the last 20 s is served in any case. A backlog is worked off in
    ``drain_s``. A replica is given up when the others would be loaded to ``down`` at most. ``level_s``,
    ``trend_s`` and ``lasts_s`` are those of :class:`policy.forecast.Smoothing`.
    """

    quantile: Annotated[float, Meta(ge=0.5, le=0.999)] = 0.9
    margin: Annotated[float, Meta(ge=1, le=10)] = 1.1
    drain_s: Seconds = 30.0
    down: Annotated[float, Meta(gt=0, le=1)] = 1.0
    level_s: Seconds = 20.0
    trend_s: Seconds = 60.0
    lasts_s: Seconds = 120.0


class Remembered(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one decision leaves to the next: the rates that came, and where the KV caches of a mode filled."""

    series: Series
    k2: dict[str, float] = {}


class Predictive:
    """Ahead of the load by the time that a start takes."""

    def __init__(self, parameters: PredictiveParameters) -> None:
        self._parameters = parameters
        self._smoothing = Smoothing(parameters.level_s, parameters.trend_s, parameters.lasts_s)

    def decide(self, view: View, memory: Any) -> Proposal:
        """The most that any of its terms asks for; fewer than there are only when nothing starts."""
        demand = view.signals.demand
        if demand is None:
            return blind(view, memory, "no gateway has told anything")
        before = recalled(memory, Remembered)
        lead_s = max(view.lead_s, view.tick_s, 1.0)
        rate = _newest(demand.arrivals, view.at - before.series.at if before else 0.0)
        series = observed(before.series if before else None, view.at, rate, self._smoothing)
        forecast = ahead(series, lead_s, self._smoothing)
        series = tried(series, sane(demand.arrivals.last_20_s), lead_s, forecast)
        high = forecast + shortfall(series, self._parameters.quantile, 20.0, forecast)
        k2 = before.k2.get(view.mode) if before else None
        after = learned(view, k2)
        kept = Remembered(series, {view.mode: after} if after is not None else {})
        mu = capacity(view)
        terms = {
            "forecast": per_replica(high, mu),
            "recent": per_replica(self._parameters.margin * sane(demand.arrivals.last_20_s), mu),
        }
        full = saturation(view, k2, queued=False)
        if full is not None:
            terms["tokens"] = full.replicas / _LOADED
        if not mu and full is None:
            return blind(view, msgspec.to_builtins(kept), "what a replica can do is not known")
        name = max(terms, key=lambda term: terms[term])
        need = terms[name]
        behind = self._backlog(view, demand, mu, lead_s)
        if behind:
            terms["queue"] = per_replica(behind / self._parameters.drain_s, mu)
            need += terms["queue"]
        if behind and _late(view, demand):
            terms["late"] = view.supply.serving + 1.0
            if terms["late"] > need:
                name, need = "late", terms["late"]
        count = whole(need)
        if count < view.count:
            count = (
                view.count if view.supply.starting_s else min(view.count, whole(need / self._parameters.down))
            )
        count = max(count, 1 if asked(view) else 0)
        return Proposal(
            count=within(view, count),
            reason=_said(name, view, demand, high, mu, terms),
            terms=terms,
            forecast=forecast,
            forecast_high=high,
            memory=msgspec.to_builtins(kept),
        )

    def _backlog(self, view: View, demand: Demand, mu: float, lead_s: float) -> float:
        """The requests that will wait when a replica that is started now is ready, if any wait now."""
        waiting = sane(demand.queued + sum(replica.waiting for replica in view.signals.replicas))
        grown = (sane(demand.arrivals.last_20_s) - view.supply.serving * mu) * lead_s
        grown -= sum(mu * max(0.0, lead_s - ready_s) for ready_s in view.supply.starting_s)
        return max(0.0, waiting + grown) if waiting else 0.0


def capacity(view: View) -> float:
    """``mu``: the requests per second that one replica takes within the objective, as they are now.

    Where the objective cannot be met at all it is what a replica keeps up with.
    """
    capability = view.capability
    promised = view.slo.ttft_p95_s is not None or view.slo.itl_p95_s is not None
    mu = sane(capability.mu) if promised else 0.0
    mu = mu or sane(capability.mu_max) * _LOADED
    replicas = view.signals.replicas
    if replicas:
        mu *= sum(_pace(replica.slowness) for replica in replicas) / len(replicas)
    return mu / (1.0 + min(sane(capability.error), _MOST_ERROR))


def _pace(slowness: float) -> float:
    return min(max(1.0 / slowness, 0.2), 1.0) if slowness > 0 else 1.0


def _newest(rates: Rates, elapsed_s: float) -> float:
    """The longest mean of arrivals that has nothing in it of what was seen before."""
    if elapsed_s >= 60.0:
        return sane(rates.last_60_s)
    return sane(rates.last_20_s if elapsed_s >= 20.0 else rates.last_6_s)


def _late(view: View, demand: Demand) -> bool:
    limit_s = view.slo.ttft_p95_s
    return limit_s is not None and demand.ttft is not None and demand.ttft.p95 > limit_s


def _said(name: str, view: View, demand: Demand, high: float, mu: float, terms: dict[str, float]) -> str:
    """One short sentence on the term that asks for the most."""
    each = f"a replica takes {mu:.3g}"
    said = {
        "forecast": f"up to {high:.3g} requests/s are expected in {view.lead_s:.0f} s, {each}",
        "recent": f"{demand.arrivals.last_20_s:.3g} requests/s came of late, {each}",
        "tokens": f"the KV caches in use, and what waits, fill {terms.get('tokens', 0.0):.3g} replicas",
        "late": f"the first token comes late, and {view.supply.serving} serving is one too few",
    }[name]
    if name != "late" and terms.get("queue"):
        said += f"; {demand.queued} wait"
    return said
