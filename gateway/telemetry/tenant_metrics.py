"""Metrics per tenant of the deployment file, with a bounded number of label values.

The first :data:`MOST` names are labels while the worker lives, as shared metric files never drop a series.
Later ones share the label :data:`OTHER`; requests without a tenant have :data:`NONE`.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterator
from typing import Final

from gateway.telemetry.metric_families import MetricFamilies, TokenCounters, publish_counts, publish_total

# Some 9 series each.
MOST: Final = 500
# No tenant or model can be called so: names begin with a letter or a digit.
OTHER: Final = "_other"
NONE: Final = "_none"


class TenantCounters:
    """The counts of one label in this worker since they were last published."""

    def __init__(self) -> None:
        self.requests: Counts[str] = Counts()
        self.exceeded: Counts[tuple[str, str, str]] = Counts()
        self.queued_s = 0.0
        self.tokens = TokenCounters()


class TenantMetrics:
    """The published counters of tenants."""

    def __init__(self, declared: MetricFamilies) -> None:
        self._counters: dict[str, TenantCounters] = {NONE: TenantCounters(), OTHER: TenantCounters()}
        self._requests = declared.counter("tidegate_tenant_requests")
        self._queued = declared.counter("tidegate_tenant_queue_seconds")
        self._tokens = declared.counter("tidegate_tenant_tokens")
        self._exceeded = declared.counter("tidegate_limit_exceeded")

    def of(self, tenant: str) -> TenantCounters:
        """The counters of a declared tenant; those of no tenant for the empty name."""
        label = tenant or NONE
        counters = self._counters.get(label)
        if counters is None and len(self._counters) - 2 >= MOST:
            counters = self._counters[OTHER]
        if counters is None:
            counters = self._counters[label] = TenantCounters()
        return counters

    def publish(self) -> Iterator[None]:
        """Publish one label at a time, of those with news."""
        for tenant, counters in list(self._counters.items()):
            if counters.requests:
                yield
                publish_counts(self._requests, counters.requests, tenant)
                publish_total(self._queued, counters, "queued_s", tenant)
            if counters.exceeded:
                publish_counts(self._exceeded, counters.exceeded, tenant)
            if counters.tokens.prompt or counters.tokens.completion:
                counters.tokens.publish(self._tokens, tenant)
