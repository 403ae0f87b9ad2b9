"""Part 2: TTFT and ITL added by a gateway, open loop, at fractions of the slowest Rust peer's capacity."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import ExitStack

import msgspec

from loadtests.bench.benchmark_size import BenchmarkSize, log
from loadtests.bench.load_generator import LoadGenerator, LoadResult, paced
from loadtests.bench.median_and_range import MedianAndRange, medians_and_ranges
from loadtests.bench.parts.cost import check
from loadtests.bench.processes import MockUpstream
from loadtests.bench.replica import MockReplicaSettings
from loadtests.bench.systems import BenchmarkedSystem, RunningSystem, running
from loadtests.bench.upstream_answers import stream_body
from loadtests.bench.workload import SizedChats
from policy.stats.quantiles import nearest_rank

CHUNKS = 16
GAP_S = 0.01
SHARES = (0.3, 0.6, 0.9)
# Streams per second at which capacity is measured: busy enough to be warm, without a queue.
PROBE_RATE = 200.0
DIRECT = "no gateway"


class AddedLatency(msgspec.Struct, kw_only=True):
    """One system at one rate, in seconds. TTFT is that added to a run without a gateway in the same round.

    ITL's 99th percentile is absolute; the upstream's gap is 10 ms.
    """

    added_p50: MedianAndRange
    added_p99: MedianAndRange
    itl_p99: MedianAndRange
    cpu: MedianAndRange


class LatencyResults(msgspec.Struct, kw_only=True):
    """All cells: by fraction of the capacity, then by system.

    ``capacity`` is in streams per second, by the processor time of each at :data:`PROBE_RATE`: busier
    gateways read several chunks at once and carry somewhat more.
    """

    slowest: str
    capacity: float
    chunks: int
    itl_direct_p99: dict[str, MedianAndRange]
    cells: dict[str, dict[str, AddedLatency]]


async def measure(
    systems: Sequence[BenchmarkedSystem], upstream: MockUpstream, plan: BenchmarkSize
) -> LatencyResults:
    """Capacity first, then the cells, interleaved by round; each round has one arrival sequence for all."""
    upstream.configure(MockReplicaSettings(chunks=CHUNKS, gap_s=GAP_S))
    request, expected = SizedChats(110, plan.prefixes, stream=True), stream_body(CHUNKS)
    with ExitStack() as stack:
        started = [stack.enter_context(running(each, upstream.urls, plan.gateway_cores)) for each in systems]
        capacities: dict[str, float] = {}
        for each in started:
            due = paced(PROBE_RATE, plan.cell_s, random.Random(plan.seed))  # noqa: S311 - arrivals
            for _ in range(2):  # the first warms up
                before = each.tree.cpu_s()
                check(await LoadGenerator(each.port, request, expected).open(due), each.system.name)
                capacities[each.system.name] = len(due) / (each.tree.cpu_s() - before)
            log(f"latency: {each.system.name} carries {capacities[each.system.name]:.0f} streams/s a core")
        of_peers = {each.name: capacities[each.name] for each in systems if not each.ours} or capacities
        slowest = min(of_peers, key=lambda name: of_peers[name])
        capacity = of_peers[slowest]

        async def cell(each: RunningSystem | None, rate: float, turn: int) -> tuple[LoadResult, float]:
            due = paced(rate, plan.cell_s, random.Random(f"{plan.seed} {turn} {rate}"))  # noqa: S311
            port = upstream.ports[0] if each is None else each.port
            before = each.tree.cpu_s() if each is not None else 0.0
            result = await LoadGenerator(port, request, expected).open(due)
            check(result, DIRECT if each is None else each.system.name)
            used = each.tree.cpu_s() - before if each is not None else 0.0
            return result, used / result.wall_s

        found: dict[str, dict[str, list[dict[str, float]]]] = {}
        direct: dict[str, list[float]] = {}
        for turn in range(plan.rounds):
            for share in SHARES:
                level = f"{share:.0%}"
                bare, _ = await cell(None, share * capacity, turn)
                direct.setdefault(level, []).append(nearest_rank(bare.itl, 0.99))
                for each in started:
                    result, cpu = await cell(each, share * capacity, turn)
                    values = {
                        "added_p50": nearest_rank(result.ttft, 0.5) - nearest_rank(bare.ttft, 0.5),
                        "added_p99": nearest_rank(result.ttft, 0.99) - nearest_rank(bare.ttft, 0.99),
                        "itl_p99": nearest_rank(result.itl, 0.99),
                        "cpu": cpu,
                    }
                    found.setdefault(level, {}).setdefault(each.system.name, []).append(values)
                    shown = " ".join(f"{name} {1e3 * v:.2f}" for name, v in values.items() if name != "cpu")
                    log(f"latency {turn + 1}/{plan.rounds} at {level} {each.system.name}: {shown} ms")
    return LatencyResults(
        slowest=slowest,
        capacity=capacity,
        chunks=CHUNKS,
        itl_direct_p99={level: MedianAndRange.of(values) for level, values in direct.items()},
        cells={
            level: {name: AddedLatency(**medians_and_ranges(rounds)) for name, rounds in by_system.items()}
            for level, by_system in found.items()
        },
    )
