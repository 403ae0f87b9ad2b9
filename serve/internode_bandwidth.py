"""The bandwidth between nodes of a joined Ray cluster: ``python -m serve.internode_bandwidth --state DIR``.

The deployment is read from standard input, as JSON. The answer is one line: the pairs that were measured, or
``{"error": ...}`` with exit status 1.
"""

from __future__ import annotations

import argparse
import socket
import sys
import time
from pathlib import Path

import msgspec

from policy.deployment_file.parse import parse
from policy.errors import TidegateError
from serve.ray_launcher import join
from store.state_dir import StateDir

SECONDS = 1.0
_TIMEOUT_S = 20.0
_PINGS = 20
_CHUNK = bytes(1 << 20)


class NodePair(msgspec.Struct, frozen=True, kw_only=True):
    """What one node sent another over one TCP connection: bytes per second, and the best round trip."""

    source: str
    target: str
    bytes_per_s: float
    rtt_s: float


class BandwidthReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The pairs, each node to the next by address, or why there are none."""

    pairs: tuple[NodePair, ...] = ()
    error: str = ""


def receive(server: socket.socket) -> None:
    """Serve one :func:`send`: echo its pings, take its data, and confirm the end."""
    with server:
        server.settimeout(_TIMEOUT_S)
        connection, _ = server.accept()
    with connection:
        connection.settimeout(_TIMEOUT_S)
        for _ in range(_PINGS):
            connection.sendall(connection.recv(1))
        while connection.recv(len(_CHUNK)):
            pass
        connection.sendall(b".")


def send(host: str, port: int, seconds: float) -> tuple[float, float]:
    """Send for ``seconds``; returns bytes per second until all has arrived, and the best round trip."""
    trips = []
    with socket.create_connection((host, port), timeout=_TIMEOUT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_PINGS):
            began = time.perf_counter()
            connection.sendall(b".")
            connection.recv(1)
            trips.append(time.perf_counter() - began)
        sent, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            connection.sendall(_CHUNK)
            sent += len(_CHUNK)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
        return sent / (time.perf_counter() - began), min(trips)


def measure() -> BandwidthReport:
    """Measure on the cluster that this process has joined: each node sends to the next, one after another."""
    import ray  # noqa: PLC0415 - only what has joined a cluster may load Ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: PLC0415

    class Node:
        def listen(self, host: str) -> int:
            self.server = socket.create_server((host, 0))
            return int(self.server.getsockname()[1])

        def receive(self) -> None:
            receive(self.server)

        def send(self, host: str, port: int) -> tuple[float, float]:
            return send(host, port, SECONDS)

    alive = sorted((node["NodeManagerAddress"], node["NodeID"]) for node in ray.nodes() if node["Alive"])
    if len(alive) < 2:
        return BandwidthReport()
    nodes = {
        address: ray.remote(Node)
        .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
        .remote()
        for address, node in alive
    }
    pairs = []
    addresses = list(nodes)
    for source, target in zip(addresses, addresses[1:] + addresses[:1], strict=True):
        port = ray.get(nodes[target].listen.remote(target), timeout=_TIMEOUT_S)
        received = nodes[target].receive.remote()
        speed, trip = ray.get(nodes[source].send.remote(target, port), timeout=_TIMEOUT_S + SECONDS)
        ray.get(received, timeout=_TIMEOUT_S)
        pairs.append(NodePair(source=source, target=target, bytes_per_s=speed, rtt_s=trip))
    return BandwidthReport(pairs=tuple(pairs))


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", type=Path, required=True)
    given = parser.parse_args()
    try:
        join(parse(msgspec.json.decode(sys.stdin.buffer.read())), StateDir(given.state))
        found = measure()
    except (TidegateError, OSError, RuntimeError, TimeoutError) as error:
        found = BandwidthReport(
            error=str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        )
    print(msgspec.json.encode(found).decode(), flush=True)  # noqa: T201
    sys.exit(1 if found.error else 0)


if __name__ == "__main__":
    main()
