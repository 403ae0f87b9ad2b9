"""Round robin and least loaded on the same simulated replicas, to compare routing by adapter with. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from loadtests.bench.answers import adapter_name
from loadtests.bench.replica import CHARS_PER_TOKEN, Counts, Mark, Replica

Choose = Callable[[int, Sequence[int], random.Random], int]


def round_robin(index: int, in_flight: Sequence[int], rng: random.Random) -> int:
    """One after the other."""
    return index % len(in_flight)


def least_loaded(index: int, in_flight: Sequence[int], rng: random.Random) -> int:
    """The one with the fewest requests; one of those at random."""
    least = min(in_flight)
    return rng.choice([i for i, load in enumerate(in_flight) if load == least])


BASELINES: dict[str, Choose] = {
    "round robin (computed)": round_robin,
    "least loaded (computed)": least_loaded,
}


def replay(
    replicas: Sequence[Replica],
    due: Sequence[float],
    drawn: Sequence[int],
    choose: Choose,
    rng: random.Random,
    *,
    chars: int,
) -> tuple[list[Counts], list[float]]:
    """Send request i, of ``chars`` characters, for adapter ``drawn[i]`` at ``due[i]`` where ``choose`` says.

    Returns what each replica counted and each request's TTFT in seconds.
    """
    ends: list[list[float]] = [[] for _ in replicas]
    ttft: list[float] = []
    setting = replicas[0].setting
    for index, at in enumerate(due):
        for own in ends:
            own[:] = [end for end in own if end > at]
        chosen = choose(index, [len(own) for own in ends], rng)
        mark = Mark(index, 0, chars // CHARS_PER_TOKEN)
        first = replicas[chosen].arrive(mark, adapter_name(drawn[index]), at)
        ends[chosen].append(first + setting.chunks * setting.gap_s)
        ttft.append(first - at)
    return [replica.counts() for replica in replicas], ttft
