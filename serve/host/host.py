"""The replica host: it owns a replica's resources and keeps its engine, a child process, alive.

This module is over 400 lines: start, watch and end of an engine share one state.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from policy.config.deployment import ModelSpec
from policy.errors import EngineFailed, TidegateError
from policy.scaling.rollout import MAX_FAILURES, STABLE_S
from policy.stats.backoff import Backoff, failures_after
from policy.types import Load, Replica, ReplicaPhase, StartPath
from policy.wire.heartbeat import AdapterRef, AdapterUse, Orders
from policy.wire.reports import EngineReport, PowerReport
from serve.engine.main import Event
from serve.engine.port import EngineSpec
from serve.engine.step_stats import merge
from serve.gpu_metrics import devices, watch
from serve.host import cores, page_cache
from serve.host.versions import Versions
from serve.host.weights import Weights, prepare_verified
from store.adapters.blobs import node_cache
from store.log_file import RotatingLog
from store.process import end_child
from store.progress import Progress
from store.state_dir import StateDir, default_root, private_directory

KILL_AFTER_S = 10.0
RESTART_BACKOFF = Backoff(0.2, 10.0, factor=4.0)
# What an engine said just before it died is still in the pipe then.
LAST_WORDS_S = 0.2


class HostSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a host is told when it is made: one shape of one generation of one model.

    ``weights`` are the generation's, ``None`` for an engine that has none.
    ``state_dir`` is a path of the head, for logs where this node can make it. ``loopback`` says that
    the whole fleet is this machine, so nothing needs to listen elsewhere. ``versions`` are the head's.
    """

    model: ModelSpec
    weights: Weights | None
    shape: str
    generation: int
    state_dir: str
    controller: str
    secret: str
    loopback: bool = True
    versions: Versions


class ReplicaHost:
    """Runs one engine and restarts it in place with backoff.

    ``changed`` is set whenever :meth:`snapshot` has changed in more than its load, ``lost`` once
    the engine failed too often in a row, or left as it was told, and the host should be replaced.
    """

    def __init__(self, spec: HostSpec, *, replica: str, address: str, node: str) -> None:
        self.spec = spec
        self.changed = asyncio.Event()
        self.lost = asyncio.Event()
        self._replica = replica
        self._address = address
        self._node = node
        self._state = ReplicaPhase.STARTING
        self._load = Load(at=time.time())
        self._adapters: tuple[str, ...] = ()
        self._hold: tuple[AdapterRef, ...] = ()
        self._uses: list[AdapterUse] = []
        self._waiting: tuple[AdapterUse, ...] = ()
        self._engine: EngineReport | None = None
        self._preempted = self._preempted_before = 0
        self.power: PowerReport | None = None
        self._url = ""
        self._reason = ""
        self._incarnation = 0
        self._failures = 0
        self._start_s: float | None = None
        self._start_path = StartPath.CACHED
        self._ready_at: float | None = None
        self._max_model_len: int | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._cores: tuple[int, ...] = ()
        self._weights = ""
        self._log = _log_of(Path(spec.state_dir), f"replica-{replica}.log")
        self._task: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        self._drained = asyncio.Event()

    @property
    def replicas(self) -> tuple[ReplicaHost, ...]:
        """What of it beats: itself, for it has one engine."""
        return (self,)

    def snapshot(self) -> Replica:
        """The replica as it is now."""
        return Replica(
            id=self._replica,
            model=self.spec.model.name,
            shape=self.spec.shape,
            generation=self.spec.generation,
            state=self._state,
            load=self._load,
            url=self._url,
            node=self._node,
            incarnation=self._incarnation,
            pid=self._process.pid if self._process else 0,
            adapters=self._adapters,
            reason=self._reason,
            start_s=self._start_s,
            start_path=self._start_path,
            max_model_len=self._max_model_len,
            failures=self._failures,
        )

    def obey(self, orders: Orders) -> None:
        """Have the engine do what the controller wants; one that starts later is told first of all."""
        if orders.leave and self._leaving is None:
            self._leaving = asyncio.create_task(self._leave(orders.leave))
        if orders.hold is None or orders.hold == self._hold:
            return
        self._hold = orders.hold
        self._tell(b"hold " + msgspec.json.encode(self._hold))

    def take_uses(self) -> tuple[AdapterUse, ...]:
        """What the engine did with adapters since the last call, oldest first."""
        uses, self._uses = (*self._uses, *self._waiting), []
        return uses

    def take_engine(self) -> EngineReport | None:
        """What the engine told of its steps since the last call, and its totals; ``None`` if nothing."""
        told, self._engine = self._engine, None
        return told

    async def start(self) -> None:
        """Return when the engine is ready; raises :class:`EngineFailed` when it keeps failing."""
        self.begin()
        await self._settled.wait()
        if self._state is not ReplicaPhase.READY:
            raise EngineFailed(self._reason)

    def begin(self) -> None:
        """Start the engine, and go on without waiting for it."""
        self._watching = asyncio.create_task(self._watch_cards())
        self._task = asyncio.create_task(self._keep_alive())
        self._task.add_done_callback(self._ended)

    async def drain(self, timeout_s: float, why: str = "draining") -> None:
        """Refuse new requests at once, and return when none is in flight or after ``timeout_s``."""
        if self._state is not ReplicaPhase.READY or self._process is None or self._process.stdin is None:
            return
        self._become(ReplicaPhase.DRAINING, why)
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(b"drain\n")
            await self._process.stdin.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._drained.wait()

    async def stop(self) -> None:
        """End the engine and everything that it started."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        for task in (self._watching, self._leaving):
            if task is not None:
                task.cancel()
        # Said only now, for what a stopped replica held may be given to another; and why a host
        # gave up outlasts it, for that may be all that the controller hears.
        self._become(ReplicaPhase.STOPPED, self._reason if self.lost.is_set() else "stopped")
        self._log.close()

    async def _leave(self, why: str) -> None:
        """Drain, and have the host replaced."""
        await self.drain(self.spec.model.control.mode.drain_timeout_s, why)
        self.lost.set()

    def _tell(self, command: bytes) -> None:
        """Say a line to the engine, if there is one."""
        process = self._process
        if process is not None and process.returncode is None and process.stdin is not None:
            process.stdin.write(command + b"\n")

    async def _turn(self) -> None:
        """Return when the engine may be started: at once where nobody else uses its cards."""

    async def _give_up(self) -> bool:
        """It failed too often in a row; returns whether that is all, or it is to be tried again."""
        self.lost.set()
        return True

    def _become(self, state: ReplicaPhase, reason: str = "") -> None:
        self._state = state
        self._reason = reason
        self.changed.set()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            # Nobody watches the engine any more: a fresh host must.
            self._become(ReplicaPhase.STARTING, repr(error))
            self.lost.set()
        self._settled.set()

    async def _keep_alive(self) -> None:
        while True:
            await self._turn()
            self._ready_at = None
            try:
                await self._run_engine(time.monotonic())
                reason = "the engine ended"
            except (TidegateError, OSError) as error:
                reason = str(error)
            if self._state is ReplicaPhase.DRAINING:
                self._drained.set()
                return
            # Loading is no life: a start that is slow and fails is one of a row of failures.
            lived_s = 0.0 if self._ready_at is None else time.monotonic() - self._ready_at
            self._failures = failures_after(self._failures, lived_s, STABLE_S)
            self._url = ""
            self._load = Load(at=time.time())
            self._waiting = ()
            self._incarnation += 1
            self._become(ReplicaPhase.STARTING, reason)
            if self._failures >= MAX_FAILURES and await self._give_up():
                return
            await asyncio.sleep(RESTART_BACKOFF.delay_s(self._failures))

    async def _run_engine(self, began: float) -> None:
        model, shape = self.spec.model, self.spec.model.shapes[self.spec.shape]
        if (weights := self.spec.weights) is not None:
            known = await asyncio.to_thread(page_cache.was_read_before, weights.digest)
            self._start_path = StartPath.CACHED if known else StartPath.COLD
            prepared = await asyncio.to_thread(
                prepare_verified, weights, token_file=model.token_file, progress=self._log_progress
            )
            self._weights = str(prepared.path)
            if not shape.gpus and not self._cores:
                self._cores = await asyncio.to_thread(cores.claim_cores, cores.default_path(), shape.cpus)
        read, write = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "serve.engine.main", "--events", str(write),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT, pass_fds=(write,), env=self._environment(),
                start_new_session=True,
            )  # fmt: skip
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        pump = asyncio.create_task(self._log.pump(process.stdout))
        try:
            process.stdin.write(msgspec.json.encode(self._engine_spec()) + b"\n")
            failed = await self._listen(read, began)
            if failed:
                raise EngineFailed(failed)
            code = await process.wait()
            raise EngineFailed(f"the engine ended with {_status(code)}")
        finally:
            await end_child(process, KILL_AFTER_S, group=True)
            pump.cancel()

    async def _listen(self, read: int, began: float) -> str:
        """Follow the engine's events until its pipe closes; returns its last words."""
        reader = asyncio.StreamReader(limit=1 << 20)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read, "rb")
        )
        process = self._process
        assert process is not None
        ended = asyncio.create_task(process.wait())
        failed = ""
        try:
            while True:
                line = asyncio.create_task(reader.readline())
                # The engine's own children may hold the pipe open after it died: its end counts.
                await asyncio.wait(
                    {line, ended}, return_when=asyncio.FIRST_COMPLETED, timeout=self._patience_s
                )
                if not line.done():
                    await asyncio.wait({line}, timeout=LAST_WORDS_S)
                if not line.done():
                    line.cancel()
                    silent = "" if ended.done() else f"the engine was silent for {self._patience_s:g} s"
                    return failed or silent
                if not line.result().endswith(b"\n"):
                    return failed
                failed = self._take(msgspec.json.decode(line.result(), type=Event), began) or failed
        finally:
            ended.cancel()
            transport.close()

    @property
    def _patience_s(self) -> float | None:
        """How long an engine may say nothing: once it listens, it reports every second."""
        return self.spec.model.control.progress_timeout_s if self._url else None

    def _take(self, event: Event, began: float) -> str:
        if event.url:
            self._url = event.url
            self._max_model_len = event.max_model_len
            self._start_s = time.monotonic() - began
            if self.spec.weights is not None:
                page_cache.record_read(self.spec.weights.digest)
        if event.line is not None:
            self._load = event.line.load
            self._adapters = event.line.adapters
            if event.line.state is ReplicaPhase.READY and self._state is ReplicaPhase.STARTING:
                self._ready_at = time.monotonic()
                self._become(ReplicaPhase.READY)
                self._settled.set()
            elif self._drains_for_good(event.line.state) and not self._load.in_flight:
                self._drained.set()
            # How many wait is as true as the last line, also if nothing else is new.
            self._waiting = tuple(
                AdapterUse(name=use.name, digest=use.digest, waiting=use.waiting)
                for use in event.uses
                if use.waiting
            )
        if event.engine is not None:
            if event.engine.preempted < self._preempted:
                # An engine that was restarted counts from nothing again.
                self._preempted_before += self._preempted
            self._preempted = event.engine.preempted
            total = self._preempted_before + self._preempted
            self._engine = merge(self._engine, msgspec.structs.replace(event.engine, preempted=total))
        self._uses.extend(msgspec.structs.replace(use, waiting=0) for use in event.uses)
        return event.failed

    def _drains_for_good(self, does: ReplicaPhase) -> bool:
        """Whether the engine does what :meth:`drain` told it; one that sleeps has nothing to drain."""
        told = self._state is ReplicaPhase.DRAINING
        return told and does in (ReplicaPhase.DRAINING, ReplicaPhase.ASLEEP)

    def _engine_spec(self) -> EngineSpec:
        model, shape = self.spec.model, self.spec.model.shapes[self.spec.shape]
        adapters = model.adapters
        return EngineSpec(
            kind=model.engine,
            replica=self._replica,
            model=model.name,
            runner=model.runner,
            shape=self.spec.shape,
            generation=self.spec.generation,
            host=self._address,
            secret=self.spec.secret,
            bound=shape.max_in_flight,
            weights=self._weights,
            tensor_parallel=shape.tensor_parallel,
            cpus=0 if shape.gpus else shape.cpus,
            engine_args={**model.engine_args, **shape.engine_args},
            sim=model.sim,
            progress_timeout_s=model.control.progress_timeout_s,
            adapter_slots=0 if adapters is None else adapters.slots_per_replica,
            max_rank=0 if adapters is None else adapters.max_rank,
            max_bytes=0 if adapters is None else adapters.max_bytes,
            # The head's own are a path of the head, which other nodes have not and pull from.
            blobs=(str(StateDir(Path(self.spec.state_dir)).adapters), str(node_cache())),
            controller=self.spec.controller,
            hold=self._hold,
        )

    def _log_progress(self, progress: Progress) -> None:
        if progress.fraction is not None or progress.step not in ("fetch", "verify"):
            # Something is made or downloaded, or another process that does so is waited for.
            self._start_path = StartPath.COLD
        self._log.write(f"{progress.step}: {progress.message}\n".encode())

    async def _watch_cards(self) -> None:
        def tell(power: PowerReport | None) -> None:
            self.power = power

        gpus = self.spec.model.shapes[self.spec.shape].gpus
        await watch(devices(gpus, self._environment()), tell)

    def _environment(self) -> dict[str, str]:
        # Ray narrows a worker's threads and metrics; neither is the engine's.
        env = {k: v for k, v in os.environ.items() if k not in _NOT_INHERITED}
        env |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}
        if self._cores:
            env["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, self._cores))
            # While a mode is switched two engines share cores, and threads that spin at each barrier for
            # one that waits for its turn made 154 s of a model's initialisation. A spin this short costs
            # nothing alone (28 tok/s against 26 by default and 23 without any).
            env["GOMP_SPINCOUNT"] = "10000"
        return env | self.spec.model.env


_NOT_INHERITED = frozenset(
    {
        "OMP_NUM_THREADS",
        "PROMETHEUS_MULTIPROC_DIR",
        "VLLM_SERVER_DEV_MODE",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
        "VLLM_API_KEY",
    }
)


def _log_of(root: Path, name: str) -> RotatingLog:
    """The log below ``root``, or on a node that cannot make it below the user's own directory there."""
    try:
        return RotatingLog(StateDir(root).logs / name)
    except OSError:
        try:
            return RotatingLog(StateDir(default_root()).logs / name)
        except (OSError, RuntimeError):  # a user without a home
            return RotatingLog(private_directory() / "logs" / name)


def _status(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
