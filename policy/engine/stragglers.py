"""Detection of replicas that are slower than others of their shape at the same load.

Their steps must not change the engine model. Steps are compared within a region of load, without a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median, median_low

import msgspec

from policy.engine.step_samples import Region, StepSample

# Limits of what is kept: replicas, latest regions of a replica, latest samples of a region.
REPLICAS, REGIONS, KEPT = 32, 24, 3
# Samples that a comparison needs, and after how many samples of each other replica a report is dropped.
MIN_SAMPLES = 3
LATELY = 48
# Replicas that differ by less than this fraction are alike.
ALIKE = 0.2


class StepReport(msgspec.Struct, kw_only=True):
    """Seconds per step of a replica by region, oldest first, as of ``seen`` samples of all replicas."""

    regions: list[Region] = []
    seconds: list[list[float]] = []
    seen: int = 0


def reports_of(
    reports: dict[str, StepReport], replica: str, samples: Sequence[StepSample], seen: int
) -> None:
    """Keep the samples that ``replica`` reports, and drop replicas that have not reported for long.

    The replica "" is that of samples whose origin is unknown.
    """
    if not replica or not samples:
        return
    own = reports.pop(replica, None) or StepReport()
    reports[replica] = own
    own.seen = seen
    # The last is the region that was seen last.
    by_region = dict(zip(own.regions, own.seconds, strict=True))
    for sample in samples:
        by_region[sample.region()] = [*by_region.pop(sample.region(), ()), sample.seconds][-KEPT:]
    own.regions, own.seconds = list(by_region)[-REGIONS:], list(by_region.values())[-REGIONS:]
    while len(reports) > REPLICAS or seen - reports[next(iter(reports))].seen > LATELY * len(reports):
        del reports[next(iter(reports))]


def slowdown(reports: Mapping[str, StepReport], replica: str) -> float:
    """The ratio of the step time of ``replica`` to that of its peers; 1 if unknown.

    The reference is the median of the replicas; of two, the faster one.
    """
    own = reports.get(replica)
    if own is None:
        return 1.0
    found, samples_seen = [], 0
    for key, seconds in zip(own.regions, own.seconds, strict=True):
        of_all = [each.seconds[each.regions.index(key)] for each in reports.values() if key in each.regions]
        if len(of_all) > 1:
            found.append(median(seconds) / median_low(map(median, of_all)))
            samples_seen += min(map(len, of_all))
    factor = median(found) if samples_seen >= MIN_SAMPLES else 1.0
    return 1.0 if 1.0 / (1.0 + ALIKE) < factor < 1.0 + ALIKE else factor
