"""Part 4: one of four replicas becomes twenty times slower, or is killed in the middle of its streams."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence

import msgspec

from loadtests.bench.benchmark_size import BenchmarkSize, log
from loadtests.bench.load_generator import LoadGenerator, paced
from loadtests.bench.median_and_range import MedianAndRange, medians_and_ranges
from loadtests.bench.processes import MockUpstream
from loadtests.bench.replica import MockReplicaSettings
from loadtests.bench.systems import BenchmarkedSystem, running
from loadtests.bench.upstream import UpstreamCommand
from loadtests.bench.upstream_answers import stream_body
from loadtests.bench.workload import PrefixedChats, draws
from policy.stats.quantiles import nearest_rank

CHUNKS = 32
RATE = 60.0
SECONDS = 9.0
SLOW = 20.0
SETTING = MockReplicaSettings(chunks=CHUNKS, gap_s=0.01, base_s=0.005, token_s=4e-5, lanes=2)
EVENTS = {"slow": UpstreamCommand(replica=0, slow=SLOW), "killed": UpstreamCommand(replica=0, kill=True)}


class FailureResult(msgspec.Struct, kw_only=True):
    """One system in one scene, over all rounds; TTFT in seconds, of whole answers.

    ``failed`` requests got anything but the whole answer; ``reported`` ones ended with an error status or
    event, the others were cut off.
    """

    failed: MedianAndRange
    reported: MedianAndRange
    p50: MedianAndRange
    p99: MedianAndRange
    outcomes: dict[str, int]


async def measure(
    systems: Sequence[BenchmarkedSystem], upstream: MockUpstream, plan: BenchmarkSize
) -> dict[str, dict[str, FailureResult]]:
    """Every system with its own retries on; the event comes after a third of the run, and stays."""
    rounds: dict[str, dict[str, list[dict[str, float]]]] = {}
    outcomes: dict[tuple[str, str], Counter[str]] = {}
    for turn in range(plan.rounds):
        for scene, event in EVENTS.items():
            for system in systems:
                seconds = max(2.0, SECONDS * min(1.0, plan.scale))
                rng = random.Random(f"{plan.seed} {turn} {scene}")  # noqa: S311
                due = paced(RATE, seconds, rng)
                request = PrefixedChats(draws(len(due), 32, 0.0, rng), 4096, 256)
                upstream.order(UpstreamCommand(replica=0, revive=True))
                upstream.configure(SETTING)
                with running(system, upstream.urls, plan.gateway_cores, retries=True) as each:
                    load = LoadGenerator(each.port, request, stream_body(CHUNKS))
                    loop = asyncio.get_running_loop()
                    loop.call_later(seconds / 3, upstream.order, event)
                    result = await load.open(due)
                wrong = result.wrong
                found = {
                    "failed": float(wrong.total()),
                    "reported": float(wrong["error_event"] + wrong["status"]),
                    "p50": nearest_rank(result.ttft, 0.5),
                    "p99": nearest_rank(result.ttft, 0.99),
                }
                rounds.setdefault(scene, {}).setdefault(system.name, []).append(found)
                outcomes.setdefault((scene, system.name), Counter()).update(wrong)
                log(
                    f"failing {turn + 1}/{plan.rounds}, {scene}, {system.name}: {dict(wrong)} of {len(due)}, "
                    f"TTFT p50 {1e3 * found['p50']:.0f} p99 {1e3 * found['p99']:.0f} ms"
                )
    upstream.order(UpstreamCommand(replica=0, revive=True))
    return {
        scene: {
            name: FailureResult(outcomes=dict(outcomes[scene, name]), **medians_and_ranges(found))
            for name, found in by_system.items()
        }
        for scene, by_system in rounds.items()
    }
