"""Compare the metrics of the gateway for a run with the measurements of the users."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from loadtests.slo_attainment import RequestSlo, RunStatistics
from policy.stats.histogram import GAPS, SECONDS

# Workers publish twice a second: two equal readings further apart than that are complete.
PUBLISHED_S = 0.6
SETTLE_S = 10.0
# A sample's name and sorted labels.
Key = tuple[str, tuple[tuple[str, str], ...]]
ROUTES = ("/v1/chat/completions", "/v1/completions")
# The others change without requests.
_READ = frozenset(
    f"tidegate_{name}"
    for name in ("requests", "served_streams", "in_flight", "ttft_seconds", "itl_seconds", "e2e_seconds")
)


@dataclass(frozen=True)
class MetricComparison:
    """One quantity measured on both sides; ``unit`` belongs to both."""

    name: str
    unit: str
    users: float
    gateway: float

    @property
    def difference(self) -> float:
        """Relative difference of the users' value to the gateway's; infinite without a gateway value."""
        if self.gateway == self.users:
            return 0.0
        return self.users / self.gateway - 1 if self.gateway else float("inf")


def read(text: str, model: str) -> Counter[Key]:
    """A model's samples of requests and latencies from Prometheus text."""
    return Counter(
        {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            if family.name in _READ
            for sample in family.samples
            if sample.labels.get("model") == model
        }
    )


def settled(fetch: Callable[[], Counter[Key]], sleep: Callable[[float], None] = time.sleep) -> Counter[Key]:
    """Samples when all workers have published and no request is in flight, or after 10 s."""
    before = fetch()
    for _ in range(int(SETTLE_S / PUBLISHED_S)):
        sleep(PUBLISHED_S)
        now = fetch()
        if now == before and not _sum(now, "tidegate_in_flight"):
            break
        before = now
    return now


def compare(
    before: Counter[Key], after: Counter[Key], ledger: RunStatistics, objective: RequestSlo
) -> list[MetricComparison]:
    """Means in ms, counts, and goodput of streams on both sides, over the duration of the users' run.

    For an answer in one piece the gateway does not know the token count, so it has no goodput. Streams are
    counted by the gateway's buckets on both sides, so that a limit within a bucket makes no difference.
    """
    delta = Counter({key: value - before[key] for key, value in after.items()})
    total = ledger.total()
    served = sum(_sum(delta, "tidegate_requests_total", route=route, outcome="ok") for route in ROUTES)
    streams = (
        (float(labels["ttft_le"]), float(labels["itl_le"]), value)
        for labels, value in _samples(delta, "tidegate_served_streams_total")
    )
    seconds = ledger.seconds or 1.0

    def mean(name: str) -> float:
        count = _sum(delta, f"tidegate_{name}_seconds_count")
        return 1000 * _sum(delta, f"tidegate_{name}_seconds_sum") / count if count else 0.0

    return [
        MetricComparison("TTFT mean", "ms", _mean_ms(total.ttft_s, total.begun), mean("ttft")),
        MetricComparison("ITL mean", "ms", _mean_ms(total.itl_s, total.gaps), mean("itl")),
        MetricComparison("E2E mean", "ms", _mean_ms(total.e2e_s, total.served), mean("e2e")),
        MetricComparison("streams begun", "", total.begun, _sum(delta, "tidegate_ttft_seconds_count")),
        MetricComparison("requests served", "", total.served, served),
        MetricComparison(
            "goodput of streams",
            "/s",
            _met(total.streams_by_bucket(), objective) / seconds,
            _met(streams, objective) / seconds,
        ),
    ]


def _met(streams: Iterable[tuple[float, float, float]], objective: RequestSlo) -> float:
    """Streams within both limits; of a bucket that a limit divides, the fraction below the limit."""
    return sum(
        count * _below(objective.ttft_s, ttft_le, SECONDS) * _below(objective.itl_s, itl_le, GAPS)
        for ttft_le, itl_le, count in streams
    )


def _below(limit: float, edge: float, edges: Sequence[float]) -> float:
    start = max((each for each in edges if each < edge), default=0.0)
    if limit >= edge or limit <= start:
        return float(limit >= edge)
    return (limit - start) / (edge - start)  # 0 in the last bucket, whose upper bound is infinite


def _samples(samples: Counter[Key], name: str) -> Iterator[tuple[dict[str, str], float]]:
    return ((dict(key[1]), value) for key, value in samples.items() if key[0] == name)


def _sum(samples: Counter[Key], name: str, **labels: str) -> float:
    return sum(value for have, value in _samples(samples, name) if labels.items() <= have.items())


def _mean_ms(total_s: float, count: int) -> float:
    return 1000 * total_s / count if count else 0.0
