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
from policy.signals.types import Demand


class Metric(StrEnum):
    """The metric kept at a target."""

    CONCURRENCY = "concurrency"
    QUEUE = "queue"
    KV_USED = "kv_used"
    TTFT_P95 = "ttft_p95"
    TOKENS_PER_S = "tokens_per_s"


# The default target of each metric, in its own unit, per replica.
TARGETS: dict[Metric, float] = {
    Metric.CONCURRENCY: 16.0,
    Metric.QUEUE: 4.0,
    Metric.KV_USED: 0.7,
    Metric.TTFT_P95: 1.0,
    Metric.TOKENS_PER_S: 2000.0,
}
# The maximum age of a replica's metrics in seconds.
FRESH_S = 15.0


class TargetTracking(Section, frozen=True):
    """The proportional rule on one metric.

    ``metric`` is kept at ``target`` per replica; within ``tolerance`` of it nothing changes.

    ``concurrency``: requests that wait or run, over 20 s. ``queue``: those that wait, in gateways and
    engines. ``kv_used``: the part of the KV cache in use (0..1). ``ttft_p95``: seconds, whose target is
    the objective if there is one. ``tokens_per_s``: scheduled by the engine.
    """

    metric: Metric = Metric.CONCURRENCY
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
        if self.metric in (Metric.CONCURRENCY, Metric.QUEUE):
            return self._by_total(view, self._total(view, demand), target)
        values = self._values_of(view, demand)
        if not values:
            return view.hold(None, f"no replica reports {self.metric}")
        return self._by_each(view, values, target)

    def _target_of(self, view: View) -> float:
        if self.target is not None:
            return self.target
        if self.metric is Metric.TTFT_P95 and view.slo.ttft_p95_s is not None:
            return view.slo.ttft_p95_s
        return TARGETS[self.metric]

    def _total(self, view: View, demand: Demand) -> float:
        if self.metric is Metric.CONCURRENCY:
            return is_usable(demand.concurrency.last_20_s)
        return is_usable(demand.queued + sum(replica.waiting for replica in view.signals.replicas))

    def _values_of(self, view: View, demand: Demand) -> list[float]:
        """The known values of the serving replicas."""
        if self.metric is Metric.TTFT_P95:
            known = demand.ttft is not None and demand.ttft.count > 0
            return (
                [is_usable(demand.ttft.p95)] * view.supply.serving
                if demand.ttft is not None and known
                else []
            )
        fresh = [replica for replica in view.signals.replicas if replica.age_s <= FRESH_S]
        if self.metric is Metric.KV_USED:
            return [is_usable(replica.kv_used) for replica in fresh]
        return [is_usable(replica.tokens_per_s) for replica in fresh]

    def _by_total(self, view: View, total: float, target: float) -> Proposal:
        """The count for a total, which starting replicas share too."""
        needed = per_replica(total, target)
        terms = {str(self.metric): needed}
        if view.count and abs(needed / view.count - 1.0) <= self.tolerance:
            return self._near(view, total / view.count, target, terms)
        count = view.within(whole(needed))
        said = f"{self.metric} is {total:.4g}, target {target:.4g} per replica"
        return Proposal(count=count, reason=said, terms=terms)

    def _by_each(self, view: View, values: list[float], target: float) -> Proposal:
        """The count for a mean; replicas without metrics count against the change."""
        mean = sum(values) / len(values)
        ratio = mean / target
        silent = max(0, view.supply.serving - len(values))
        if ratio > 1.0:
            # Starting replicas count as idle, so that they are not requested again.
            idle = silent + max(len(view.supply.starting_s), view.count - view.supply.serving)
            counted = len(values) + idle
            ratio = sum(values) / target / counted
            direction = 1
        else:
            counted = len(values) + silent
            ratio = (sum(values) / target + silent) / counted
            direction = -1
        needed = min(ratio * counted, 1e9)
        terms = {str(self.metric): needed}
        if abs(ratio - 1.0) <= self.tolerance or (ratio - 1.0) * direction < 0:
            return self._near(view, mean, target, terms)
        count = whole(needed)
        if (count - view.count) * direction < 0:
            return self._near(view, mean, target, terms)
        said = f"{self.metric} is {mean:.4g} on average over {len(values)}, target {target:.4g}"
        return Proposal(count=view.within(count), reason=said, terms=terms)

    def _near(self, view: View, mean: float, target: float, terms: dict[str, float]) -> Proposal:
        said = f"{self.metric} is {mean:.4g} on average, close enough to the target {target:.4g}"
        return Proposal(count=view.within(view.count), reason=said, terms=terms)
