"""One inherited socket or SO_REUSEPORT: errors of clients while a gateway worker is replaced under load.

``python -m loadtests.bench.sockets [--rounds 3] [--json FILE]``. Three ways to share the client port between
two workers: one listening socket that both inherit; a SO_REUSEPORT socket for each, which only its worker
holds; and the same, held open by the parent as well. In each round one worker is ended by SIGTERM or SIGKILL
and replaced, while some clients open a connection for every request and others keep theirs. Then eight
workers get connections that stay open, one by one and at once: how many has each?
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import uvloop

from loadtests.bench.figures import Figure
from loadtests.bench.processes import ROOT, Mock, mock
from policy.stats.quantiles import nearest_rank
from tidegate.replay.http_client import Connection, ResponseBody

WAYS = ("inherited", "reuseport", "reuseport-held")
REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b"connection: %b\r\ncontent-length: %d\r\n\r\n%b"
)
BODY = b'{"model":"alpha","messages":[{"role":"user","content":"hi"}]}'
NEW_CONNECTION = REQUEST % (b"close", len(BODY), BODY)
KEPT_CONNECTION = REQUEST % (b"keep-alive", len(BODY), BODY)
KEPT_PERIOD_S = 0.05


def listening(port: int, *, reuse: bool) -> socket.socket:
    """A listening socket on ``port`` (0: any)."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuse:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind(("127.0.0.1", port))
    made.listen(2048)
    return made


class Workers:
    """Gateway workers on one port, each of which can be replaced."""

    def __init__(self, way: str, root: Path, count: int = 2) -> None:
        self._way = way
        self._root = root
        self._admin = listening(0, reuse=False)
        first = listening(0, reuse=way != "inherited")
        self.port: int = first.getsockname()[1]
        self._sockets = {0: first}
        for slot in range(1, count):
            self._sockets[slot] = first if way == "inherited" else listening(self.port, reuse=True)
        self.processes: dict[int, asyncio.subprocess.Process] = {}

    async def start(self, slot: int) -> None:
        """Start the worker of ``slot`` and wait until it reports that it serves."""
        sock = self._sockets.get(slot) or listening(self.port, reuse=True)
        fds = (sock.fileno(), self._admin.fileno())
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gateway.main", "--state", str(self._root), "--worker", str(slot)),
            *("--fd", str(fds[0]), "--admin-fd", str(fds[1])),
            cwd=ROOT,
            pass_fds=fds,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(self._root / "metrics")},
        )
        self.processes[slot] = process
        assert process.stderr is not None
        await process.stderr.readline()
        if self._way == "reuseport":  # only the worker holds it
            sock.close()
            self._sockets.pop(slot, None)

    async def end(self, slot: int, number: signal.Signals) -> None:
        """End the worker of ``slot`` and wait for its exit."""
        process = self.processes[slot]
        if process.returncode is None:
            process.send_signal(number)
        await process.wait()

    def connections(self) -> list[int]:
        """How many client connections each worker has."""
        return [
            sum(
                each.laddr.port == self.port and each.status == psutil.CONN_ESTABLISHED
                for each in psutil.Process(process.pid).net_connections("tcp4")
            )
            for process in self.processes.values()
        ]

    def close(self) -> None:
        for sock in {*self._sockets.values(), self._admin}:
            sock.close()


class Clients:
    """Clients of both kinds, and the outcomes of their requests."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.outcomes: Counter[str] = Counter()
        self.e2e_s: list[float] = []
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, rate: float, kept: int) -> None:
        """``rate`` new connections a second with one request each, and ``kept`` that stay open."""
        self._tasks = [asyncio.create_task(self._send_on_kept_connection()) for _ in range(kept)]
        self._tasks.append(asyncio.create_task(self._send_at(rate)))

    async def stop(self) -> None:
        """Send no more requests; those in flight have 5 s to end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _send_at(self, rate: float) -> None:
        running: set[asyncio.Task[None]] = set()
        due = time.perf_counter()
        try:
            while True:
                task = asyncio.create_task(self._send_on_new_connection())
                running.add(task)
                task.add_done_callback(running.discard)
                due += 1 / rate
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
        finally:
            if running:
                await asyncio.wait(running, timeout=5)

    async def _send_on_new_connection(self) -> None:
        began = time.perf_counter()
        try:
            async with asyncio.timeout(20):
                outcome = await self._send(await self._connect(), NEW_CONNECTION)
        except OSError as error:
            outcome = type(error).__name__
        self.outcomes[outcome] += 1
        if outcome == "ok":
            self.e2e_s.append(time.perf_counter() - began)

    async def _send_on_kept_connection(self) -> None:
        connection: Connection | None = None
        while True:
            began = time.perf_counter()
            try:
                if connection is None or not connection.open:
                    connection = await self._connect()
                outcome = await self._send(connection, KEPT_CONNECTION)
            except OSError as error:
                outcome = type(error).__name__
            self.outcomes[f"kept {outcome}"] += 1
            await asyncio.sleep(max(0.0, KEPT_PERIOD_S - (time.perf_counter() - began)))

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, "127.0.0.1", self._port)
        return connection

    async def _send(self, connection: Connection, request: bytes) -> str:
        status = await connection.exchange(request, ResponseBody())
        return "ok" if status == 200 else str(status)


@contextmanager
def _deployment(upstream: Mock) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as root:
        model = {"name": "alpha", "engine": "external", "urls": upstream.urls}
        Path(root, "deployment.json").write_text(json.dumps({"models": [model]}))
        yield Path(root)


async def one_round(
    way: str, number: signal.Signals, root: Path, given: argparse.Namespace
) -> dict[str, Any]:
    """End one of two workers by the signal ``number`` under load, and replace it."""
    workers = Workers(way, root)
    await asyncio.gather(workers.start(0), workers.start(1))
    await asyncio.sleep(0.5)
    clients = Clients(workers.port)
    clients.start(given.rate, given.kept)
    await asyncio.sleep(given.seconds)
    before, steady = workers.connections(), list(clients.e2e_s)
    clients.e2e_s.clear()
    await workers.end(0, number)
    await workers.start(0)
    await asyncio.sleep(given.seconds)
    during = list(clients.e2e_s)
    after = workers.connections()
    await clients.stop()
    await asyncio.gather(*(workers.end(slot, signal.SIGTERM) for slot in (0, 1)))
    workers.close()
    wrong = {outcome: count for outcome, count in clients.outcomes.items() if not outcome.endswith("ok")}
    return {
        "ok": clients.outcomes["ok"],
        "wrong": wrong,
        "kept before": before,
        "kept after": after,
        "p99 before": nearest_rank(steady, 0.99),
        "p99 during": nearest_rank(during, 0.99),
        "max during": max(during),
    }


async def spread(way: str, root: Path, count: int, bursts: tuple[int, ...]) -> list[list[int]]:
    """The connections of each of ``count`` workers after each burst; the first comes one by one."""
    workers = Workers(way, root, count)
    await asyncio.gather(*(workers.start(slot) for slot in range(count)))
    await asyncio.sleep(0.5)
    found: list[list[int]] = []
    for burst in bursts:
        opening = (asyncio.open_connection("127.0.0.1", workers.port) for _ in range(burst))
        opened = await asyncio.gather(*opening) if found else [await one for one in opening]
        await asyncio.sleep(0.5)
        found.append(workers.connections())
        for _, writer in opened:
            writer.close()
        await asyncio.sleep(0.5)
    await asyncio.gather(*(workers.end(slot, signal.SIGTERM) for slot in range(count)))
    workers.close()
    return found


async def measure(given: argparse.Namespace, upstream: Mock) -> dict[str, Any]:
    """All rounds, interleaved."""
    rounds: dict[str, list[dict[str, Any]]] = {}
    for _ in range(given.rounds):
        for number in (signal.SIGTERM, signal.SIGKILL):
            for way in WAYS:
                with _deployment(upstream) as root:
                    found = await one_round(way, number, root, given)
                rounds.setdefault(f"{way} {number.name}", []).append(found)
                sys.stdout.write(f"{way} {number.name}: {json.dumps(found)}\n")
                sys.stdout.flush()
    for way in WAYS:
        with _deployment(upstream) as root:
            sys.stdout.write(f"{way}: {await spread(way, root, 8, (400, 40, 40, 40))}\n")
    return rounds


def main() -> None:
    """Measure and print one line for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=300.0, help="new connections a second")
    parser.add_argument("--kept", type=int, default=40, help="clients that keep their connection")
    parser.add_argument("--seconds", type=float, default=4.0, help="before the end of a worker and after")
    parser.add_argument("--json", type=Path, help="where to write every round")
    given = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    with mock(1, cores) as upstream:
        rounds = uvloop.run(measure(given, upstream))
    for name, found in rounds.items():
        failed = Figure.of([sum(each["wrong"].values()) for each in found]).text()
        slowest = Figure.of([each["max during"] for each in found]).text(0, 1e3)
        sys.stdout.write(f"{name}: failed {failed}, slowest {slowest} ms\n")
    if given.json:
        given.json.write_text(json.dumps(rounds, indent=1))


if __name__ == "__main__":
    main()
