"""One inherited socket or SO_REUSEPORT: what clients notice when a gateway worker is replaced under load.

``python -m loadtests.bench.sockets [--rounds 3] [--json FILE]``. Three ways to share the client port
between two workers: one listening socket that both inherit; a SO_REUSEPORT socket for each, which its
worker alone holds; and the same held open by the parent too. In each round one worker is ended by
SIGTERM (a replacement starts when it is gone) and one by SIGKILL, while clients connect anew for
every request and others keep their connections.
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

WAYS = ("inherited", "reuseport", "reuseport-held")
REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b"connection: %b\r\ncontent-length: %d\r\n\r\n%b"
)
BODY = b'{"model":"alpha","messages":[{"role":"user","content":"hi"}]}'
ANEW = REQUEST % (b"close", len(BODY), BODY)
KEPT = REQUEST % (b"keep-alive", len(BODY), BODY)


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
    """Two gateway workers on one port, each of which can be replaced."""

    def __init__(self, way: str, root: Path) -> None:
        self._way = way
        self._root = root
        self._admin = listening(0, reuse=False)
        first = listening(0, reuse=way != "inherited")
        self.port: int = first.getsockname()[1]
        self._sockets = {0: first, 1: first if way == "inherited" else listening(self.port, reuse=True)}
        self.processes: dict[int, asyncio.subprocess.Process] = {}

    async def start(self, slot: int) -> None:
        """Start the worker of ``slot`` and wait until it says that it serves."""
        sock = self._sockets.get(slot)
        if sock is None:
            sock = listening(self.port, reuse=True)
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
        if self._way == "reuseport":  # the worker alone holds it
            sock.close()
            self._sockets.pop(slot, None)

    async def end(self, slot: int, number: signal.Signals) -> None:
        """End the worker of ``slot`` and wait until it is gone."""
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
        """Let go of the sockets."""
        for sock in {*self._sockets.values(), self._admin}:
            sock.close()


class Clients:
    """Clients of both kinds, and what happened to their requests."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.outcomes: Counter[str] = Counter()
        self.took: list[float] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._kept: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def start(self, rate: float, kept: int) -> None:
        """``rate`` new connections a second, each for one request; ``kept`` more that ask every 50 ms."""
        self._tasks = [asyncio.create_task(self._stay()) for _ in range(kept)]
        self._tasks.append(asyncio.create_task(self._arrive(rate)))

    async def stop(self) -> None:
        """No more requests; those that run are waited for, a little."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _arrive(self, rate: float) -> None:
        running: set[asyncio.Task[None]] = set()
        due = time.perf_counter()
        try:
            while True:
                task = asyncio.create_task(self._once())
                running.add(task)
                task.add_done_callback(running.discard)
                due += 1 / rate
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
        finally:
            if running:
                await asyncio.wait(running, timeout=5)

    async def _once(self) -> None:
        began = time.perf_counter()
        try:
            async with asyncio.timeout(20):
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                writer.write(ANEW)
                answer = await reader.read()
                writer.close()
        except (OSError, TimeoutError) as error:
            self.outcomes[type(error).__name__] += 1
            return
        self._count(answer, began)

    async def _stay(self) -> None:
        writer: asyncio.StreamWriter | None = None
        while True:
            began = time.perf_counter()
            try:
                if writer is None:
                    reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                writer.write(KEPT)
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                await reader.readexactly(length)
                if head.startswith(b"HTTP/1.1 200"):
                    self.outcomes["kept ok"] += 1
                else:
                    self.outcomes["kept " + head[9:12].decode()] += 1
                if b"connection: close" in head.lower():
                    writer.close()
                    writer = None
            except (OSError, asyncio.IncompleteReadError) as error:
                self.outcomes[f"kept {type(error).__name__}"] += 1
                writer = None
            await asyncio.sleep(max(0.0, 0.05 - (time.perf_counter() - began)))

    def _count(self, answer: bytes, began: float) -> None:
        if answer.startswith(b"HTTP/1.1 200"):
            self.outcomes["ok"] += 1
            self.took.append(time.perf_counter() - began)
        else:
            self.outcomes[answer[9:12].decode() if answer else "EmptyAnswer"] += 1


@contextmanager
def _deployment(upstream: Mock) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as root:
        model = {"name": "alpha", "engine": "external", "urls": upstream.urls}
        Path(root, "deployment.json").write_text(json.dumps({"models": [model]}))
        yield Path(root)


async def one_round(
    way: str, number: signal.Signals, root: Path, given: argparse.Namespace
) -> dict[str, Any]:
    """One worker of two is ended by ``number`` in the middle of the load, and replaced."""
    workers = Workers(way, root)
    await asyncio.gather(workers.start(0), workers.start(1))
    await asyncio.sleep(0.5)
    clients = Clients(workers.port)
    await clients.start(given.rate, given.kept)
    await asyncio.sleep(given.seconds)
    before, steady = workers.connections(), list(clients.took)
    clients.took.clear()
    await workers.end(0, number)
    await workers.start(0)
    await asyncio.sleep(given.seconds)
    blip = list(clients.took)
    after = workers.connections()
    await clients.stop()
    await asyncio.gather(*(workers.end(slot, signal.SIGTERM) for slot in (0, 1)))
    workers.close()
    wrong = {what: n for what, n in clients.outcomes.items() if what not in ("ok", "kept ok")}
    return {
        "ok": clients.outcomes["ok"],
        "wrong": wrong,
        "kept before": before,
        "kept after": after,
        "p99 before": nearest_rank(steady, 0.99),
        "p99 during": nearest_rank(blip, 0.99),
        "max during": max(blip),
    }


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
        blip = Figure.of([each["max during"] for each in found]).text(0, 1e3)
        sys.stdout.write(f"{name}: failed {failed}, slowest {blip} ms\n")
    if given.json:
        given.json.write_text(json.dumps(rounds, indent=1))


if __name__ == "__main__":
    main()
