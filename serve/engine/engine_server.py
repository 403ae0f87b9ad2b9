"""The engine in its process: it is built, served behind the guard, and reports to its host.

The first line of standard input is the :class:`serve.engine.interface.EngineSpec`. Later lines are commands:
``drain``, ``sleep`` with the seconds to drain, ``wake``, ``progress`` with a new progress timeout, and
``hold`` with a JSON list of :class:`policy.wire.heartbeat.AdapterRef`. End of file means that the host is
gone: requests are given back, and the whole process group is killed. Events are JSON lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from policy.errors import EngineFailed
from policy.types import EngineKind, ReplicaPhase
from policy.wire import frames
from policy.wire.canary_request import CANARIES
from policy.wire.controller_reports import EngineReport
from policy.wire.headers import CANARY_HEADER, SECRET_HEADER
from policy.wire.heartbeat import AdapterRef, AdapterUse
from policy.wire.load_stream import LoadReport
from serve.engine.adapters.files import AdapterFileCache
from serve.engine.adapters.loader import AdapterLoader
from serve.engine.frame_server import FrameServerConnection
from serve.engine.interface import ASGIApp, Engine, EngineSpec
from serve.engine.request_guard import RequestGuard
from serve.engine.sleep import SleepControl
from serve.gpu_metrics import devices, product_name
from store.event_loop.uvicorn_server import UvicornServer
from store.json_log_format import log_to
from store.os_process import allow_connections
from store.state_dir import listen

MODULES = {EngineKind.VLLM: "serve.engine.vllm", EngineKind.SIM: "serve.engine.sim.engine"}
CHECK_S = 0.25
REPORT_S = 0.1
# The first requests of an engine may compile kernels: they may take so many times its progress timeout.
FIRST_STEPS = 5
# A replica becomes ready after this many seconds even if planned adapters are not loaded yet.
HOLD_S = 60.0
# Time in which gateways learn that an engine without a host ends.
GIVEN_BACK_S = 0.1
# Maximum bytes of a line on standard input: a `hold` may list thousands of adapters.
MAX_LINE = 1 << 24

CPUINFO = Path("/proc/cpuinfo")

log = logging.getLogger("tidegate.engine")


class EngineEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line from the engine to its host.

    ``line`` is its load, ``uses`` the adapter usage since the last line, ``engine`` the steps since then and
    totals since the start, ``failed`` the error that ended it.
    """

    url: str = ""
    max_model_len: int | None = None
    line: LoadReport | None = None
    uses: tuple[AdapterUse, ...] = ()
    engine: EngineReport | None = None
    failed: str = ""


Send = Callable[[EngineEvent], None]


def send(descriptor: int, event: EngineEvent) -> None:
    """Write one line to the host. A host that is gone is detected on standard input, not here."""
    with contextlib.suppress(BrokenPipeError):
        os.write(descriptor, msgspec.json.encode(event) + b"\n")


class HttpOrFramesProtocol(HttpToolsProtocol):
    """HTTP, or frames if a connection begins with their preface. For ``http`` of uvicorn's configuration."""

    def __init__(self, app: ASGIApp, secret: str, **given: Any) -> None:
        super().__init__(**given)
        self._frames = (app, secret)
        self._start: bytes | None = b""

    def data_received(self, data: bytes) -> None:
        if self._start is not None:
            data = self._start + data
            if data[: len(frames.MAGIC)] == frames.MAGIC:
                self._start = None
                self.connections.discard(self)
                FrameServerConnection(*self._frames, self.transport, self.server_state).data_received(data)
                return
            if frames.MAGIC.startswith(data):
                self._start = data
                return
            self._start = None
        super().data_received(data)


class EngineWatchdog:
    """Detects an engine that has requests but makes no steps."""

    def __init__(self, now: float) -> None:
        self._steps = -1
        self._since = now

    def check(self, steps: int, busy: bool, now: float, timeout_s: float) -> None:
        """Raise :class:`policy.errors.EngineFailed` after ``timeout_s`` without a step while busy."""
        if steps != self._steps or not busy:
            self._steps, self._since = steps, now
        elif now - self._since > timeout_s:
            raise EngineFailed(f"no engine step for {now - self._since:.0f} s with requests running")


async def follow_commands(
    reader: asyncio.StreamReader, guard: RequestGuard, adapters: AdapterLoader, sleep_control: SleepControl
) -> None:
    """Obey the commands of the host; its end ends this process."""
    while line := await reader.readline():
        command, _, given = line.strip().partition(b" ")
        if command == b"drain":
            sleep_control.leave()
            guard.become(ReplicaPhase.DRAINING)
            adapters.hold(())
        # Also before sleep: the host sends each order once, and it counts when the engine has woken.
        elif command == b"hold" and not sleep_control.left:
            adapters.hold(msgspec.json.decode(given, type=tuple[AdapterRef, ...]))
        elif command == b"sleep":
            sleep_control.sleep(float(given))
        elif command == b"wake":
            sleep_control.wake()
        elif command == b"progress":
            sleep_control.timeout_s = float(given)
    # The host is gone, so the engine's own processes must be killed here. No request is to blame for that.
    guard.give_back()
    await asyncio.sleep(GIVEN_BACK_S)
    os.killpg(0, signal.SIGKILL)


async def _watch(engine: Engine, guard: RequestGuard, timeout_s: Callable[[], float]) -> None:
    progress = EngineWatchdog(time.monotonic())
    while True:
        await asyncio.sleep(CHECK_S)
        await engine.check()
        stats = engine.stats()
        patience = FIRST_STEPS if guard.state is ReplicaPhase.STARTING else 1
        busy = stats.running + stats.waiting > 0 and not guard.profiling
        progress.check(stats.steps, busy, time.monotonic(), patience * timeout_s())


async def _report(
    engine: Engine, guard: RequestGuard, adapters: AdapterLoader, report_event: Send, hardware: str
) -> None:
    async for line in guard.lines():
        stats = engine.stats()
        report = EngineReport(
            preempted=stats.preempted,
            deferred=stats.deferred,
            steps=engine.take_steps(),
            timing=engine.timing(),
            hardware=hardware,
        )
        report_event(EngineEvent(line=line, uses=adapters.uses(), engine=report))
        await asyncio.sleep(REPORT_S)


async def run_canary(url: str, spec: EngineSpec, timeout_s: float) -> None:
    """Send the canary to ``url``; raises :class:`policy.errors.EngineFailed` when it gets no answer."""
    headers = {SECRET_HEADER: spec.secret, CANARY_HEADER: "1"}
    reason = ""
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout_s, trust_env=False) as client:
        for path, body in CANARIES[spec.runner]:
            try:
                answer = await client.post(path, json={"model": spec.model, **body})
            except httpx.HTTPError as error:
                raise EngineFailed(f"the canary got no answer from {path}: {error!r}") from error
            if answer.status_code == httpx.codes.OK:
                return
            reason = f"{path} answered {answer.status_code}: {answer.text[:300]}"
    raise EngineFailed(f"the canary failed: {reason}")


async def _prepare(url: str, spec: EngineSpec, adapters: AdapterLoader) -> None:
    """Prepare for traffic: the canary must be answered and the planned adapters loaded."""
    await run_canary(url, spec, FIRST_STEPS * spec.progress_timeout_s)
    try:
        async with asyncio.timeout(HOLD_S):
            await adapters.settled()
    except TimeoutError:
        log.warning("not all adapters were loaded in %g s; the others follow", HOLD_S)


async def run(spec: EngineSpec, stdin: asyncio.StreamReader, report_event: Send) -> None:
    """Serve ``spec`` until the engine fails or the process is stopped."""
    create = importlib.import_module(MODULES[spec.kind]).create
    engine: Engine = await create(spec)
    roots = [Path(root) for root in spec.blobs]
    files = AdapterFileCache(roots, controller=spec.controller, secret=spec.secret, max_bytes=spec.max_bytes)
    adapters = AdapterLoader(engine, files)
    adapters.hold(spec.hold)
    bound = spec.bound or engine.timing().limits.max_num_seqs
    guard = RequestGuard(engine, adapters, secret=spec.secret, bound=bound, clock=time.time)
    # Bound after the engine has made its own processes, so that none of them inherits the port.
    sock = listen(spec.host, 0)
    config = uvicorn.Config(
        guard,
        http=partial(HttpOrFramesProtocol, guard, spec.secret),  # type: ignore[arg-type] # it is called only
        loop="uvloop", access_log=False, log_level="warning", lifespan="auto",
        timeout_keep_alive=300, timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = UvicornServer(config)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.handle_exit, signal.SIGTERM, None)
    url = f"http://{spec.host}:{sock.getsockname()[1]}"
    sleep_control = SleepControl(
        engine,
        guard,
        adapters,
        lambda: run_canary(url, spec, sleep_control.timeout_s),
        spec.progress_timeout_s,
    )
    tasks = {
        asyncio.create_task(server.serve(sockets=[sock])),
        asyncio.create_task(adapters.run()),
        asyncio.create_task(follow_commands(stdin, guard, adapters, sleep_control)),
        asyncio.create_task(_watch(engine, guard, lambda: sleep_control.timeout_s)),
        asyncio.create_task(_report(engine, guard, adapters, report_event, describe_machine(spec))),
    }
    preparing = asyncio.create_task(_prepare(url, spec, adapters))
    done, _ = await asyncio.wait({*tasks, preparing}, return_when=asyncio.FIRST_COMPLETED)
    if done == {preparing}:
        preparing.result()
        report_event(EngineEvent(url=url, max_model_len=engine.max_model_len))
        guard.become(ReplicaPhase.READY)
        tasks.add(asyncio.create_task(sleep_control.run()))
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    await engine.close()


def describe_machine(
    spec: EngineSpec, environment: Mapping[str, str] = os.environ, cpuinfo: Path = CPUINFO
) -> str:
    """The GPUs or cores of the engine that ``spec`` describes."""
    if spec.kind is EngineKind.SIM:
        return f"simulated: {spec.sim.profile} at {spec.sim.speed:g} times its speed"
    if spec.cpus:
        return f"{spec.cpus} of {os.cpu_count()} cores of {_cpu(cpuinfo)}"
    return (
        f"{spec.share * spec.tensor_parallel:g} x {product_name(devices(spec.tensor_parallel, environment))}"
    )


def _cpu(cpuinfo: Path) -> str:
    with contextlib.suppress(OSError):
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.machine()


async def _main(descriptor: int) -> None:
    reader = asyncio.StreamReader(limit=MAX_LINE)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    spec = msgspec.json.decode(await reader.readline(), type=EngineSpec)
    os.set_inheritable(descriptor, False)
    report_event = partial(send, descriptor)
    try:
        await run(spec, reader, report_event)
    except Exception as error:
        # Report any error to the host: the operator needs it.
        report_event(EngineEvent(failed=f"{type(error).__name__}: {error}"[:2000]))
        raise


def serve(descriptor: int) -> None:
    """Serve until the engine ends, and then end this process. Events go to the file ``descriptor``."""
    # A request is a connection, and the usual limit of 1,024 is below the bound of many shapes.
    allow_connections()
    # The engine has its own form for the rest.
    log_to(logging.StreamHandler(), "tidegate")
    try:
        uvloop.run(_main(descriptor))
    except BaseException:
        traceback.print_exc()
        # The engine's own processes are in this group and must not outlive it.
        os.killpg(0, signal.SIGKILL)
        raise
    # Threads that an engine leaves behind must not keep a stopped replica alive.
    os._exit(0)
