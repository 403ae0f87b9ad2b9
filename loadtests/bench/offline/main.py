"""What routing policies make of shared prefixes and adapters, in virtual time.

``python -m loadtests.bench.affinity_policy [--seeds N]`` prints a table for each situation, those of the
benchmark first, with its arrivals. ``cold`` are prefills that no cache helped (of adapters: loads),
``least`` the fewest by which load could have stayed within 1.10 of the mean, ``load`` the busiest replica's
requests over the mean, ``hit`` the part of the requests whose prefix (or adapter) was there. TTFT is in
milliseconds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from typing import NamedTuple

from loadtests.bench.figures import quantile
from loadtests.bench.offline.event_loop import Case, arrivals, play
from loadtests.bench.offline.policies import POLICIES
from loadtests.bench.parts.routing import ADAPTER_SCENE, PREFIX_SCENES, least_cold


class Outcome(NamedTuple):
    """What came of it: see the module. ``least`` is 0 where nothing can be said."""

    cold: int
    least: int
    load: float
    hit: float
    mean: float
    p50: float
    p99: float


def run(case: Case, policy: str, seed: int) -> Outcome:
    """One run; the same arguments give the same outcome."""
    drawn, due = arrivals(case, f"1 {seed}")
    played = play(case, POLICIES[policy], drawn, due, random.Random(seed))  # noqa: S311 - a simulation
    adapters = bool(case.setting.adapters)
    cold = sum(each.loads if adapters else each.cold for each in played.counts)
    return Outcome(
        cold=cold,
        least=least_cold(case, drawn),
        load=played.load,
        hit=1.0 - cold / len(drawn),
        mean=1e3 * statistics.fmean(played.ttft),
        p50=1e3 * quantile(played.ttft, 0.5),
        p99=1e3 * quantile(played.ttft, 0.99),
    )


_FITS, _ZIPF, _TIGHT, _TIGHT_ZIPF = PREFIX_SCENES
CASES = (
    *PREFIX_SCENES,
    ADAPTER_SCENE,
    _FITS._replace(name="fits, uniform, 32 clients", rate=0.0),
    _ZIPF._replace(name="fits, Zipf, 32 clients", rate=0.0),
    _FITS._replace(name="fits, uniform, 8 workers", workers=8),
    _ZIPF._replace(name="fits, Zipf, 2 workers", workers=2),
    _ZIPF._replace(name="fits, Zipf, 8 workers", workers=8),
    _ZIPF._replace(name="fits, Zipf, 8 hosts", workers=8, shared=False),
    _ZIPF._replace(name="fits, Zipf, a replica leaves and joins", leaves=500, joins=900, requests=2400),
    ADAPTER_SCENE._replace(name="200 adapters, Zipf, 32 clients", rate=0.0),
    ADAPTER_SCENE._replace(name="200 adapters, Zipf, 8 workers", workers=8),
)
HEAD = (
    f"{'':20}{'cold mean/most':>16}{'least':>7}{'load mean/most':>16}{'hit':>8}"
    f"{'TTFT mean':>11}{'p50':>7}{'p99':>8}"
)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.bench.affinity_policy", description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--only", default="", help="a part of the names of the cases to run")
    parser.add_argument("--policies", default=",".join(POLICIES))
    given = parser.parse_args()
    for case in CASES:
        if given.only in case.name:
            sys.stdout.write(f"\n{case.name} ({given.seeds} seeds)\n{HEAD}\n")
            for policy in given.policies.split(","):
                row = [run(case, policy, seed) for seed in range(given.seeds)]
                sys.stdout.write(f"{policy:20}{_line(row)}\n")
                sys.stdout.flush()


def _line(row: list[Outcome]) -> str:
    cold, least, load, hit, mean, p50, p99 = (statistics.fmean(column) for column in zip(*row, strict=True))
    most, worst = max(outcome.cold for outcome in row), max(outcome.load for outcome in row)
    return (
        f"{f'{cold:.1f}/{most}':>16}{least:7.1f}{f'{load:.3f}/{worst:.3f}':>16}{hit:8.4f}"
        f"{mean:11.1f}{p50:7.1f}{p99:8.1f}"
    )


if __name__ == "__main__":
    main()
