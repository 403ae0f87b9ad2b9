"""Keeps one metric at a target, as the Horizontal Pod Autoscaler of Kubernetes does.

``ceil(current * metric / target)``, with a tolerance. Missing metrics count against the change: as at the
target for a scale-down, as idle for a scale-up
(kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale, "Algorithm details").
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from msgspec import Meta

from policy.config.control import Section
from policy.scaling.policies.rounding import is_usable, per_replica, whole
from policy.scaling.view import Proposal, View
from policy.signals.types import ModelDemand


class TargetMetric(StrEnum):
    """The metric kept at a target."""

    CONCURRENCY = "concurrency"
    QUEUE = "queue"
    KV_USED = "kv_used"
    TTFT_P95 = "ttft_p95"
    TOKENS_PER_S = "tokens_per_s"


# The default target of each metric, in its own unit, per replica.
TARGETS: dict[TargetMetric, float] = {
    TargetMetric.CONCURRENCY: 16.0,
    TargetMetric.QUEUE: 4.0,
    TargetMetric.KV_USED: 0.7,
    TargetMetric.TTFT_P95: 1.0,
    TargetMetric.TOKENS_PER_S: 2000.0,
}
# The maximum age of a replica's metrics in seconds.
FRESH_S = 15.0


class TargetTracking(Section, frozen=True):
    """The proportional rule on one metric.

    ``metric`` is kept at ``target`` per replica; within ``tolerance`` of it nothing changes.

    ``concurrency``: requests that wait or run, over 20 s. ``queue``: those that wait, in gateways and
    engines. ``kv_used``: the fraction of the KV cache in use. ``ttft_p95``: seconds; its default
    target is that of the SLO. ``tokens_per_s``: scheduled by the engine.
    """

    metric: TargetMetric = TargetMetric.CONCURRENCY
    target: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    tolerance: Annotated[float, Meta(ge=0, le=1)] = 0.1

    def decide(self, view: View, memory: Any) -> Proposal:
        """The count that brings the metric to its target."""
        demand = view.signals.demand
        if demand is None:
            return view.hold(None, "no gateway has reported")
        target = self._target_of(view)
        if view.count == 0 and view.has_demand:
            return Proposal(count=view.within(1), reason="requests arrive and there is no replica")
        if self.metric in (TargetMetric.CONCURRENCY, TargetMetric.QUEUE):
            return self._by_total(view, self._total(view, demand), target)
        values = self._values_of(view, demand)
        if not values:
            return view.hold(None, f"no replica reports {self.metric}")
        return self._by_each(view, values, target)

    def _target_of(self, view: View) -> float:
        if self.target is not None:
            return self.target
        if self.metric is TargetMetric.TTFT_P95 and view.slo.ttft_p95_s is not None:
            return view.slo.ttft_p95_s
        return TARGETS[self.metric]

    def _total(self, view: View, demand: ModelDemand) -> float:
        if self.metric is TargetMetric.CONCURRENCY:
            return is_usable(demand.concurrency.last_20_s)
        return is_usable(demand.queued + sum(replica.waiting for replica in view.signals.replicas))

    def _values_of(self, view: View, demand: ModelDemand) -> list[float]:
        """The known values of the serving replicas."""
        if self.metric is TargetMetric.TTFT_P95:
            if demand.ttft is not None and demand.ttft.count:
                return [is_usable(demand.ttft.p95)] * view.supply.serving
            # Without traffic there is nothing to measure, which is no reason to keep replicas.
            return [0.0] * view.supply.serving if view.is_idle else []
        fresh = [replica for replica in view.signals.replicas if replica.age_s <= FRESH_S]
        return [is_usable(getattr(replica, self.metric)) for replica in fresh]

    def _by_total(self, view: View, total: float, target: float) -> Proposal:
        """The count for a total, which starting replicas share too."""
        needed = per_replica(total, target)
        if view.count and abs(needed / view.count - 1.0) <= self.tolerance:
            return self._near(view, total / view.count, target, needed)
        return self._proposal(view, whole(needed), needed, f"{total:.4g}, target {target:.4g} per replica")

    def _by_each(self, view: View, values: list[float], target: float) -> Proposal:
        """The count for a mean; replicas without metrics count against the change."""
        mean, load = sum(values) / len(values), sum(values) / target
        silent = max(0, view.supply.serving - len(values))
        rises = mean > target
        # For a scale-up replicas without metrics and starting ones count as idle, so that they are not
        # requested again; for a scale-down the former count as at the target.
        starting = max(len(view.supply.starting_s), view.count - view.supply.serving) if rises else 0
        counted = len(values) + silent + starting
        ratio = (load if rises else load + silent) / counted
        needed = min(ratio * counted, 1e9)
        count = whole(needed)
        unchanged = abs(ratio - 1.0) <= self.tolerance
        reversed_ = (ratio < 1.0 or count < view.count) if rises else (ratio > 1.0 or count > view.count)
        if unchanged or reversed_:
            return self._near(view, mean, target, needed)
        found = f"{mean:.4g} on average over {len(values)}, target {target:.4g}"
        return self._proposal(view, count, needed, found)

    def _near(self, view: View, mean: float, target: float, needed: float) -> Proposal:
        found = f"{mean:.4g} on average, close enough to the target {target:.4g}"
        return self._proposal(view, view.count, needed, found)

    def _proposal(self, view: View, count: int, needed: float, found: str) -> Proposal:
        reason, terms = f"{self.metric} is {found}", {str(self.metric): needed}
        unbounded = view.unbounded(count)
        return Proposal(count=view.within(count), reason=reason, terms=terms, unbounded=unbounded)
