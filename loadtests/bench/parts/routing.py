"""Part 3: routing. Cold prefills, balance and TTFT on four replicas that simulate their caches."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import msgspec

from loadtests.bench.benchmark_size import BenchmarkSize, log
from loadtests.bench.load_generator import LoadGenerator
from loadtests.bench.median_and_range import MedianAndRange, medians_and_ranges
from loadtests.bench.parts.cost import check
from loadtests.bench.processes import MockUpstream
from loadtests.bench.replica import CHARS_PER_TOKEN, MockReplicaCounts, MockReplicaSettings
from loadtests.bench.systems import BenchmarkedSystem, running
from loadtests.bench.upstream_answers import adapter_name, stream_body
from loadtests.bench.workload import AdapterChats, PrefixedChats, draws, even
from policy.stats.quantiles import nearest_rank


class RoutingScenario(NamedTuple):
    """Requests for ``kinds`` prefixes (adapters where ``setting`` has any) at ``rate`` per second.

    The k-th has weight ``(k+1)**-exponent``.
    """

    name: str
    setting: MockReplicaSettings
    rate: float
    requests: int = 1600
    kinds: int = 32
    exponent: float = 0.0
    replicas: int = 4


def arrivals(scene: RoutingScenario, seed: str) -> tuple[list[int], list[float]]:
    """The kind and the arrival time in seconds of each request, reproducible by seed and scene."""
    rng = random.Random(f"{seed} {scene.name}")  # noqa: S311 - a reproducible workload
    return draws(scene.requests, scene.kinds, scene.exponent, rng), even(scene.requests, scene.rate, rng)


def least_pairs(drawn: Sequence[int], replicas: int, bound: float, room: int) -> int:
    """The fewest (prefix, replica) pairs by which no replica has more than ``bound`` times the mean.

    ``room`` is how many prefixes a replica caches. The largest prefix is packed first, on the least loaded
    replica, and what exceeds the bound is packed like another prefix. This is the optimum if only prefixes
    above the bound are split, and slightly above it otherwise. 0 if they do not all fit.
    """
    most = bound * len(drawn) / replicas
    loads, homes = [0.0] * replicas, [0] * replicas
    rest = sorted(map(float, Counter(drawn).values()))
    while rest:
        part = rest.pop()
        free = [i for i in range(replicas) if homes[i] < room and loads[i] < most]
        if not free:
            return 0
        i = min(free, key=lambda i: loads[i])
        taken = min(part, most - loads[i])
        loads[i] += taken
        homes[i] += 1
        if part - taken > 1e-9:
            rest.append(part - taken)
            rest.sort()
    return sum(homes)


# Tokens of a chat (shared prefix, own text) and of a prompt for an adapter.
PREFIX_TOKENS, OWN_TOKENS, ADAPTER_TOKENS = 1024, 64, 32
PREFIX_CHARS = PREFIX_TOKENS * CHARS_PER_TOKEN
OWN_CHARS = OWN_TOKENS * CHARS_PER_TOKEN
ADAPTERS = 200
CHUNKS = 4
ADAPTER_CHARS = ADAPTER_TOKENS * CHARS_PER_TOKEN
# 50,000 prompt tokens a second and a prefix of 1024: 28 ms cold, 7 ms warm with 64 tokens of its own.
_FITS = MockReplicaSettings(
    chunks=CHUNKS, gap_s=0.005, base_s=0.006, token_s=2e-5, lanes=1, cache_tokens=12 * 1024
)
_TIGHT = msgspec.structs.replace(_FITS, cache_tokens=4 * 1024)
_ADAPTERS = MockReplicaSettings(
    chunks=CHUNKS, gap_s=0.005, base_s=0.002, token_s=2e-5, lanes=1, slots=8, load_s=0.02, adapters=ADAPTERS
)
# The rates keep four replicas about half busy when the routing is right.
PREFIX_SCENES = (
    RoutingScenario("working set fits, uniform", _FITS, rate=240.0),
    RoutingScenario("working set fits, Zipf", _FITS, rate=240.0, exponent=1.0),
    RoutingScenario("does not fit, uniform", _TIGHT, requests=800, rate=135.0),
    RoutingScenario("does not fit, Zipf", _TIGHT, requests=800, rate=135.0, exponent=1.0),
)
ADAPTER_SCENE = RoutingScenario(
    "200 adapters, Zipf", _ADAPTERS, rate=200.0, requests=2000, kinds=ADAPTERS, exponent=1.0
)
# The most requests of a replica over the mean.
BOUND = 1.10


class RoutingResult(msgspec.Struct, kw_only=True):
    """One system in one scene over all rounds; shares are 0..1, TTFT is in seconds.

    ``home`` is the fraction of requests at the replica that had most of their prefix, ``pairs`` the number of
    (prefix, replica) pairs, ``cold`` the prefills without a cache hit, ``least`` that of :func:`least_cold`,
    ``loads`` the adapter loads, ``balance`` the maximum of requests per replica over the mean.
    """

    home: MedianAndRange
    pairs: MedianAndRange
    cold: MedianAndRange
    least: MedianAndRange
    loads: MedianAndRange
    balance: MedianAndRange
    mean: MedianAndRange
    p50: MedianAndRange
    p99: MedianAndRange


def least_cold(scene: RoutingScenario, drawn: Sequence[int]) -> int:
    """The fewest cold prefills by which load could stay within :data:`BOUND`; 0 where not all is cached."""
    if scene.setting.adapters:
        return 0
    room = scene.setting.cache_tokens // PREFIX_TOKENS
    return least_pairs(drawn, scene.replicas, BOUND, room)


def round_figures(
    counts: Sequence[MockReplicaCounts], ttft: Sequence[float], least: int = 0
) -> dict[str, float]:
    """One round of :class:`RoutingResult`, from the counts of the replicas and the TTFT of the clients."""
    total = sum(each.requests for each in counts)
    prefixes = {prefix for each in counts for prefix in each.by_prefix}
    home = sum(max(each.by_prefix.get(prefix, 0) for each in counts) for prefix in prefixes)
    return {
        "home": home / total,
        "pairs": sum(len(each.by_prefix) for each in counts),
        "cold": sum(each.cold for each in counts),
        "least": least,
        "loads": sum(each.loads for each in counts),
        "balance": max(each.requests for each in counts) * len(counts) / total,
        "mean": fmean(ttft),
        "p50": nearest_rank(ttft, 0.5),
        "p99": nearest_rank(ttft, 0.99),
    }


async def measure(
    systems: Sequence[BenchmarkedSystem],
    upstream: MockUpstream,
    plan: BenchmarkSize,
    left_out: dict[str, str],
    *,
    adapters: bool,
) -> dict[str, dict[str, RoutingResult]]:
    """By scene, then by system; every run starts a system anew, with empty caches everywhere.

    A system that fails is left out from then on, with the reason in ``left_out``.
    """
    scenes = (ADAPTER_SCENE,) if adapters else PREFIX_SCENES
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for turn in range(plan.rounds):
        for scene in [each._replace(requests=plan.count(each.requests)) for each in scenes]:
            by_system = found.setdefault(scene.name, {})
            for system in systems:
                if system.name in left_out or (system.workers > 1 and scene.setting is _TIGHT):
                    continue
                try:
                    one = await _run(scene, system, upstream, plan, turn)
                except RuntimeError as error:
                    left_out[system.name] = f"{scene.name}: {error}"
                    log(f"left out from now on: {system.name}: {error}")
                    continue
                by_system.setdefault(system.name, []).append(one)
                shown = " ".join(f"{name} {value:.4g}" for name, value in one.items())
                log(f"routing {turn + 1}/{plan.rounds}, {scene.name}, {system.name}: {shown}")
    return {
        scene: {name: RoutingResult(**medians_and_ranges(rounds)) for name, rounds in by_system.items()}
        for scene, by_system in found.items()
    }


async def _run(
    scene: RoutingScenario, system: BenchmarkedSystem, upstream: MockUpstream, plan: BenchmarkSize, turn: int
) -> dict[str, float]:
    drawn, due = arrivals(scene, f"{plan.seed} {turn}")
    request: AdapterChats | PrefixedChats
    if scene.setting.adapters:
        request = AdapterChats([adapter_name(each) for each in drawn], ADAPTER_CHARS)
    else:
        request = PrefixedChats(drawn, PREFIX_CHARS, OWN_CHARS)
    upstream.configure(scene.setting)
    with running(system, upstream.urls, plan.gateway_cores) as each:
        upstream.configure(scene.setting)
        result = await LoadGenerator(each.port, request, stream_body(CHUNKS)).open(due, clients=64)
    check(result, system.name)
    return round_figures(upstream.counts(), result.ttft, least_cold(scene, drawn))
