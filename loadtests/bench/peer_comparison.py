"""Tidegate beside its peers: cost, latency, routing, failures and memory, in interleaved rounds.

``python -m loadtests.bench.peer_comparison --peers-dir DIR [--parts cost,routing] [--systems tidegate,smg]``.
Writes one JSON file for each part, a table and a plot into ``--out``; parts that are run again replace
their file, and the table is made of all that are there.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from loadtests.bench import report
from loadtests.bench.benchmark_size import BenchmarkSize, log
from loadtests.bench.parts import cost, failing, latency, routing
from loadtests.bench.processes import MockUpstream, mock
from loadtests.bench.systems import PEERS, BenchmarkedSystem, available

PARTS = ("cost", "latency", "routing", "adapters", "failing", "soak")
REPLICAS = 4
# The options that are fields of the plan.
SIZES = ("rounds", "scale", "cell_s", "prefixes", "soak", "seed", "out")
# One round robin stands for all; consistent hashing needs a session header, which these requests lack.
NO_PREFIX = ("consistent_hash",)
SAME = ("smg/round_robin", "sglang-router/round_robin")


def chosen(
    wanted: Sequence[str], folder: Path | None, workers: Sequence[int]
) -> tuple[list[BenchmarkedSystem], dict[str, str]]:
    """The systems to compare, Tidegate first, and the peers that were left out with the reason.

    ``wanted`` are names of peers or ``peer/policy``, ``tidegate/traced``, ``tidegate/limited``; empty
    takes all but the last two.
    """
    names = {name.partition("/")[0] for name in wanted}
    peers = [peer for peer in PEERS if not wanted or peer.name in names]
    pythons, left_out = available(folder, peers)
    systems = [
        BenchmarkedSystem("tidegate" if count == 1 else f"tidegate, {count} workers", workers=count)
        for count in workers
        if not wanted or "tidegate" in wanted
    ]
    systems += [BenchmarkedSystem("tidegate/traced", traced=True)] if "tidegate/traced" in wanted else []
    systems += [BenchmarkedSystem("tidegate/limited", limited=True)] if "tidegate/limited" in wanted else []
    systems += [
        BenchmarkedSystem(f"{peer.name}/{policy}", peer=peer, policy=policy, python=pythons[peer.name])
        for peer in peers
        if peer.name in pythons
        for policy in peer.policies
        if not wanted or peer.name in wanted or f"{peer.name}/{policy}" in wanted
    ]
    return systems, left_out


async def run(
    part: str,
    systems: Sequence[BenchmarkedSystem],
    upstream: MockUpstream,
    plan: BenchmarkSize,
    left_out: dict[str, str],
) -> object:
    """One part's results; ``left_out`` takes the systems that failed, and why."""
    single = [system for system in systems if system.workers == 1]
    ours = [system for system in systems if system.ours]
    match part:
        case "cost":
            return await cost.measure(single, upstream, plan)
        case "latency":
            return await latency.measure(single, upstream, plan)
        case "routing":
            shown = [each for each in systems if each.policy not in NO_PREFIX and each.name not in SAME]
            return await routing.measure(shown, upstream, plan, left_out, adapters=False)
        case "adapters":
            return await routing.measure(ours, upstream, plan, left_out, adapters=True)
        case "failing":
            best = [each for each in single if each.policy in ("", "cache_aware")]
            return await failing.measure(best, upstream, plan)
        case _:
            return await cost.measure_soak(single[0], upstream, plan)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write; returns 1 when a part could not be measured."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.bench.peer_comparison",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--peers-dir", type=Path, help="where the peers' environments are, or are made")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"any of {', '.join(PARTS)}")
    parser.add_argument(
        "--systems",
        default="",
        help="tidegate, tidegate/traced, a peer, peer/policy; without it all but traced",
    )
    parser.add_argument("--clones", default="", help="other clones of Tidegate, installed, to compare with")
    parser.add_argument("--workers", default="1,2,8", help="Tidegate's worker counts in the routing parts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the numbers of requests")
    parser.add_argument("--cell-s", type=float, default=4.0, help="seconds of each cell of the latency part")
    parser.add_argument("--prefixes", type=int, default=1000, help="different prompts in the cost part")
    parser.add_argument("--soak", type=int, default=1_000_000, help="requests of the soak part")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    given = parser.parse_args(argv)
    parts = given.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no such parts: {', '.join(sorted(unknown))}")
    # The first core is for the gateway, the next for load and upstream (the same one if it is alone).
    cores = sorted(os.sched_getaffinity(0))
    gateway_cores, other_cores = tuple(cores[:1]), tuple(cores[1:2] or cores)
    plan = BenchmarkSize(
        gateway_cores=gateway_cores, other_cores=other_cores, **{name: getattr(given, name) for name in SIZES}
    )
    wanted = [name for name in given.systems.split(",") if name]
    systems, left_out = chosen(wanted, given.peers_dir, [int(each) for each in given.workers.split(",")])
    clones = [Path(each).resolve() for each in given.clones.split(",") if each]
    systems += [BenchmarkedSystem(f"tidegate/{clone.name}", clone=clone) for clone in clones]
    for name, reason in left_out.items():
        log(f"left out: {name}: {reason}")
    if not systems:
        parser.error("nothing to measure")
    failed = False
    with mock(REPLICAS, other_cores) as upstream:
        os.sched_setaffinity(0, other_cores)
        for part in parts:
            missing = dict(left_out)
            try:
                results = uvloop.run(run(part, systems, upstream, plan, missing))
            except RuntimeError as error:
                log(f"{part} failed: {error}")
                failed = True
                continue
            command = "python -m loadtests.bench.peer_comparison " + " ".join(argv or sys.argv[1:])
            report.store(
                plan.out,
                part,
                command,
                versions=_versions(systems),
                left_out=missing,
                rounds=plan.rounds,
                results=results,
            )
    report.write(plan.out)
    sys.stdout.write((plan.out / "table.md").read_text())
    return int(failed)


def _versions(systems: Sequence[BenchmarkedSystem]) -> dict[str, str]:
    return {system.peer.name: system.peer.version for system in systems if system.peer is not None}


if __name__ == "__main__":
    sys.exit(main())
