"""What one gateway worker costs: processor time per request and per chunk, measured beside a raw mock.

Run: ``python -m loadtests.bench_gateway [--requests N] [--body-kib K] [--streams S]``. The worker is
pinned to the first core, mock and load to the second; every status and body is checked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import psutil
import uvloop

ROOT = Path(__file__).parents[1]


class Client(asyncio.Protocol):
    """One keep-alive connection that repeats a request and counts whole answers."""

    def __init__(self, request: bytes, end: bytes, share: Share) -> None:
        self._request = request
        self._end = end
        self._share = share
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._again()

    def connection_lost(self, exc: Exception | None) -> None:
        self._share.failed(exc or ConnectionError("closed"))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._buffer.endswith(self._end):
            if not self._buffer.startswith(b"HTTP/1.1 200"):
                self._share.failed(ValueError(repr(self._buffer[:300])))
                return
            self._share.bodies.add(self._buffer.partition(b"\r\n\r\n")[2][-64:])
            self._again()

    def _again(self) -> None:
        self._buffer = b""
        if self._share.take():
            self._transport.write(self._request)


class Share:
    """How many requests are left for all clients of a run."""

    def __init__(self, count: int, clients: int) -> None:
        self._left = count
        self._running = clients
        self.bodies: set[bytes] = set()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def take(self) -> bool:
        """One more request, unless all were asked; the last client to stop ends the run."""
        if self._left:
            self._left -= 1
            return True
        self._running -= 1
        if not self._running and not self.done.done():
            self.done.set_result(None)
        return False

    def failed(self, error: Exception) -> None:
        """A request that went wrong ends the run."""
        if not self.done.done():
            self.done.set_exception(error)


async def load(port: int, body: bytes, end: bytes, *, count: int, clients: int) -> tuple[float, set[bytes]]:
    """Run ``count`` requests over ``clients`` connections; the wall time in seconds and the bodies' ends."""
    request = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(body)
    ) + body
    share = Share(count, clients)
    began = time.perf_counter()
    made = [
        await asyncio.get_running_loop().create_connection(
            lambda: Client(request, end, share), "127.0.0.1", port
        )
        for _ in range(clients)
    ]
    await share.done
    took = time.perf_counter() - began
    for transport, _ in made:
        transport.abort()
    return took, share.bodies


def _bound() -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    sock.listen(1024)
    return sock


def _chat(kib: int, *, stream: bool) -> bytes:
    text = "x" * (kib * 1024) if kib else "What is the capital of France?"
    said: dict[str, Any] = {"model": "alpha", "messages": [{"role": "user", "content": text}]}
    return json.dumps({**said, "stream": True} if stream else said).encode()


async def measure(given: argparse.Namespace, port: int, worker: psutil.Process) -> None:
    """Rounds of requests, then of streams; medians of the worker's own processor time."""

    async def cost(body: bytes, end: bytes, count: int, clients: int) -> tuple[float, float]:
        before = worker.cpu_times()
        took, bodies = await load(port, body, end, count=count, clients=clients)
        after = worker.cpu_times()
        if len(bodies) != 1:
            raise ValueError(f"{len(bodies)} different answers")
        used = after.user + after.system - before.user - before.system
        return 1e6 * used / count, count / took

    small, stream = _chat(given.body_kib, stream=False), _chat(0, stream=True)
    await cost(small, b"]}", given.requests // 4, given.clients)
    rounds = [await cost(small, b"]}", given.requests, given.clients) for _ in range(given.rounds)]
    figures = [round(cpu, 1) for cpu, _ in rounds]
    rate = statistics.median(rate for _, rate in rounds)
    print(f"request: {statistics.median(figures)} us CPU, {rate:.0f}/s, rounds {figures}")  # noqa: T201
    request_us = statistics.median(figures)
    if given.streams:
        runs = [await cost(stream, b"0\r\n\r\n", given.streams, given.clients) for _ in range(given.rounds)]
        chunks = [round((cpu - request_us) / given.chunks, 1) for cpu, _ in runs]
        print(f"chunk: {statistics.median(chunks)} us CPU, rounds {chunks}")  # noqa: T201
    print(f"memory: {worker.memory_info().rss / 2**20:.0f} MiB")  # noqa: T201


def main() -> None:
    """Start mock and worker, measure, stop both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--streams", type=int, default=640)
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--gap-ms", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--body-kib", type=int, default=0)
    given = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as root, _bound() as client, _bound() as admin:
        with _bound() as free:
            mock_port = free.getsockname()[1]
        Path(root, "deployment.json").write_text(
            json.dumps(
                {
                    "models": [
                        {"name": "alpha", "engine": "external", "urls": [f"http://127.0.0.1:{mock_port}"]}
                    ]
                }
            )
        )
        mock = subprocess.Popen(
            [
                sys.executable,
                "loadtests/bench_upstream.py",
                str(mock_port),
                str(given.chunks),
                str(given.gap_ms),
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
        )
        assert mock.stdout is not None
        mock.stdout.readline()
        fds = (client.fileno(), admin.fileno())
        worker = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "gateway.main",
                "--state",
                root,
                "--fd",
                str(fds[0]),
                "--admin-fd",
                str(fds[1]),
            ],
            cwd=ROOT,
            pass_fds=fds,
            stderr=subprocess.PIPE,
            env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": f"{root}/metrics"},
        )
        assert worker.stderr is not None
        worker.stderr.readline()
        os.sched_setaffinity(worker.pid, cores[:1])
        for pid in (mock.pid, 0):
            os.sched_setaffinity(pid, cores[1:] or cores)
        try:
            uvloop.run(measure(given, client.getsockname()[1], psutil.Process(worker.pid)))
        finally:
            worker.terminate()
            mock.terminate()
            worker.wait()
            mock.wait()


if __name__ == "__main__":
    main()
