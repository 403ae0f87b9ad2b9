"""Parts 1 and 5: processor time per request and chunk, cold start, and memory over many requests."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack

import msgspec

from loadtests.bench.benchmark_size import BenchmarkSize, log
from loadtests.bench.load_generator import LoadGenerator, LoadResult
from loadtests.bench.median_and_range import MedianAndRange, medians_and_ranges, slope
from loadtests.bench.processes import MockUpstream
from loadtests.bench.replica import MockReplicaSettings
from loadtests.bench.systems import BenchmarkedSystem, RunningSystem, running
from loadtests.bench.upstream_answers import BODY, stream_body
from loadtests.bench.workload import SizedChats

CHUNKS, GAP_S, CLIENTS = 64, 0.01, 32


class SystemCost(msgspec.Struct, kw_only=True):
    """The results of one system: microseconds of the whole process tree, bytes, seconds, requests/s."""

    small_us: MedianAndRange
    kb32_us: MedianAndRange
    kb240_us: MedianAndRange
    chunk32_us: MedianAndRange
    chunk128_us: MedianAndRange
    rate: MedianAndRange
    peak: int
    cold_start_s: float


def check(result: LoadResult, name: str) -> None:
    """Raise RuntimeError unless every answer was 200 and byte-identical."""
    if result.wrong:
        raise RuntimeError(f"{name}: {dict(result.wrong)}, {result.sample}")


async def measure(
    systems: Sequence[BenchmarkedSystem], upstream: MockUpstream, plan: BenchmarkSize
) -> dict[str, SystemCost]:
    """All systems run side by side, idle but for the measured one; rounds are interleaved."""
    upstream.configure(MockReplicaSettings(chunks=CHUNKS, gap_s=GAP_S))
    cells = {
        "small_us": (SizedChats(110, plan.prefixes), plan.count(4000)),
        "kb32_us": (SizedChats(32 * 1024, min(plan.prefixes, 1000)), plan.count(1000)),
        # Few texts, so that each was seen before: prompts this long are resumed chats.
        "kb240_us": (SizedChats(240 * 1024, max(1, plan.prefixes // 20)), plan.count(300)),
    }
    streams = SizedChats(110, plan.prefixes, stream=True)
    rounds: defaultdict[str, list[dict[str, float]]] = defaultdict(list)
    with ExitStack() as stack:
        started = []
        for system in systems:
            started.append(stack.enter_context(running(system, upstream.urls, plan.gateway_cores)))
            log(f"cost: {system.name} is ready after {started[-1].cold_start_s:.2f} s")
        for turn in range(-1, plan.rounds):  # the first warms up
            for each in started:
                found: dict[str, float] = {}
                for name, (request, count) in cells.items():
                    used, result = await _used(each, LoadGenerator(each.port, request, BODY), count, CLIENTS)
                    found[name] = 1e6 * used / count
                    if name == "small_us":
                        found["rate"] = count / result.wall_s
                for clients in (32, 128):
                    count = max(clients, plan.count(5 * clients))
                    load = LoadGenerator(each.port, streams, stream_body(CHUNKS))
                    used, _ = await _used(each, load, count, clients)
                    found[f"chunk{clients}_us"] = (1e6 * used / count - found["small_us"]) / CHUNKS
                if turn >= 0:
                    rounds[each.system.name].append(found)
                    shown = " ".join(f"{name} {value:.0f}" for name, value in found.items())
                    log(f"cost {turn + 1}/{plan.rounds} {each.system.name}: {shown}")
        return {
            each.system.name: SystemCost(
                peak=each.tree.peak(),
                cold_start_s=each.cold_start_s,
                **medians_and_ranges(rounds[each.system.name]),
            )
            for each in started
        }


async def _used(
    each: RunningSystem, load: LoadGenerator, count: int, clients: int
) -> tuple[float, LoadResult]:
    await asyncio.sleep(0.05)
    before = each.tree.cpu_s()
    result = await load.closed(count, clients)
    used = each.tree.cpu_s() - before
    check(result, f"{each.system.name}, {clients} clients")
    return used, result


BATCH = 10_000


class SoakResult(msgspec.Struct, kw_only=True):
    """Resident bytes after each number of requests, and bytes per request from the second quarter on."""

    requests: list[int]
    memory: list[int]
    bytes_per_request: float
    cpu_us: float


async def measure_soak(system: BenchmarkedSystem, upstream: MockUpstream, plan: BenchmarkSize) -> SoakResult:
    """``plan.soak`` short requests, closed loop, read every batch."""
    upstream.configure(MockReplicaSettings())
    request = SizedChats(110, plan.prefixes)
    batch = max(8, min(BATCH, plan.soak // 10))
    with running(system, upstream.urls, plan.gateway_cores) as each:
        requests, memory = [0], [each.tree.memory()]
        began = each.tree.cpu_s()
        while requests[-1] < plan.soak:
            check(await LoadGenerator(each.port, request, BODY).closed(batch, CLIENTS), system.name)
            requests.append(requests[-1] + batch)
            memory.append(each.tree.memory())
            if len(memory) % 10 == 1:
                log(f"soak {requests[-1]}/{plan.soak}: {memory[-1] / 2**20:.1f} MiB")
        cpu_s = each.tree.cpu_s() - began
    settled = len(memory) // 4
    return SoakResult(
        requests=requests,
        memory=memory,
        bytes_per_request=slope(requests[settled:], memory[settled:]),
        cpu_us=1e6 * cpu_s / requests[-1],
    )
