"""The replica host: it owns a replica's resources and supervises its engine, a child process.

Over 400 lines, because start, supervision and end of an engine share one state.
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
from serve.engine.interface import EngineSpec
from serve.engine.main import Event
from serve.engine.step_stats import merge
from serve.gpu_metrics import devices, watch
from serve.host import cpu_core_assignment
from serve.host.version_check import Versions
from serve.host.weight_verification import Prepare, Weights, prepare_verified, record_read, was_read_before
from store.adapters.blobs import node_cache
from store.log_file import RotatingLog
from store.model_weights.prepare import prepare as prepare_weights
from store.os_process import end_child
from store.preparation_progress import Progress
from store.state_dir import StateDir, default_root, private_directory

KILL_AFTER_S = 10.0
RESTART_BACKOFF = Backoff(0.2, 10.0, factor=4.0)
# How long to read the pipe of a dead engine for its last output.
LAST_WORDS_S = 0.2


class HostSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The specification of a host: one shape of one revision of a model.

    ``weights`` are those of the revision, ``None`` for an engine without weights. ``state_dir`` is a path on
    the head node, used for logs if this node can create it. With ``loopback`` the whole fleet is on this
    machine, so that only loopback is listened on. ``versions`` are the head's.
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
    """Runs one engine and restarts it in place with back-off.

    ``changed`` is set whenever more than the load of :meth:`snapshot` has changed. ``lost`` is set once the
    host should be replaced: the engine failed too often in a row, or was ordered to leave.
    """

    def __init__(
        self,
        spec: HostSpec,
        *,
        replica: str,
        address: str,
        node: str,
        core_claims: Path | None = None,
        prepare: Prepare = prepare_weights,
        stable_s: float = STABLE_S,
    ) -> None:
        """``core_claims`` is the file of this node's core claims, ``prepare`` fetches weights.

        An engine that lived for ``stable_s`` seconds ends a row of failures.
        """
        self.spec = spec
        self._core_claims = core_claims or cpu_core_assignment.default_path()
        self._prepare = prepare
        self._stable_s = stable_s
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
        """The replicas that send heartbeats: itself."""
        return (self,)

    def snapshot(self) -> Replica:
        """The current state of the replica."""
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
        """Pass the controller's orders to the engine; one that starts later receives them first."""
        if orders.leave and self._leaving is None:
            self._leaving = asyncio.create_task(self._leave(orders.leave))
        if orders.hold is None or orders.hold == self._hold:
            return
        self._hold = orders.hold
        self._command(b"hold " + msgspec.json.encode(self._hold))

    def take_uses(self) -> tuple[AdapterUse, ...]:
        """The adapter usage since the last call, oldest first."""
        uses, self._uses = (*self._uses, *self._waiting), []
        return uses

    def take_engine(self) -> EngineReport | None:
        """The engine's step times since the last call and its totals; ``None`` if there are none."""
        report, self._engine = self._engine, None
        return report

    async def start(self) -> None:
        """Return when the engine is ready; raises :class:`EngineFailed` after too many failures in a row."""
        self.begin()
        await self._settled.wait()
        if self._state is not ReplicaPhase.READY:
            raise EngineFailed(self._reason)

    def begin(self) -> None:
        """Start the engine without waiting for it."""
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
        # Only now, because the resources of a stopped replica may be given to another. The reason why a
        # host gave up is kept: it may be all that the controller receives.
        self._become(ReplicaPhase.STOPPED, self._reason if self.lost.is_set() else "stopped")
        self._log.close()

    async def _leave(self, why: str) -> None:
        """Drain, and let the host be replaced."""
        await self.drain(self.spec.model.control.mode.drain_timeout_s, why)
        self.lost.set()

    def _command(self, command: bytes) -> None:
        """Send a command line to the engine, if there is one."""
        process = self._process
        if process is not None and process.returncode is None and process.stdin is not None:
            process.stdin.write(command + b"\n")

    async def _await_gpus(self) -> None:
        """Return when the engine may be started: at once, as no other engine uses its GPUs."""

    async def _give_up(self) -> bool:
        """The engine failed too often in a row; whether the host gives up instead of trying again."""
        self.lost.set()
        return True

    def _become(self, state: ReplicaPhase, reason: str = "") -> None:
        self._state = state
        self._reason = reason
        self.changed.set()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            # The engine is no longer supervised, so the host must be replaced.
            self._become(ReplicaPhase.STARTING, repr(error))
            self.lost.set()
        self._settled.set()

    async def _keep_alive(self) -> None:
        while True:
            await self._await_gpus()
            self._ready_at = None
            try:
                await self._run_engine(time.monotonic())
                reason = "the engine ended"
            except (TidegateError, OSError) as error:
                reason = str(error)
            if self._state is ReplicaPhase.DRAINING:
                self._drained.set()
                return
            # Time before ready does not count: a slow start that fails is another failure of the row.
            lived_s = 0.0 if self._ready_at is None else time.monotonic() - self._ready_at
            self._failures = failures_after(self._failures, lived_s, self._stable_s)
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
            known = await asyncio.to_thread(was_read_before, weights.digest)
            self._start_path = StartPath.CACHED if known else StartPath.COLD
            prepared = await asyncio.to_thread(
                prepare_verified,
                weights,
                token_file=model.token_file,
                progress=self._log_progress,
                prepare=self._prepare,
            )
            self._weights = str(prepared.path)
            if not shape.gpus and not self._cores:
                self._cores = await asyncio.to_thread(
                    cpu_core_assignment.claim_cores, self._core_claims, shape.cpus
                )
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
        """Follow the engine's events until its pipe closes; the error that it reported last."""
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
                # The engine's children may hold the pipe open after it died, so its exit counts.
                await asyncio.wait(
                    {line, ended}, return_when=asyncio.FIRST_COMPLETED, timeout=self._silence_timeout_s
                )
                if not line.done():
                    await asyncio.wait({line}, timeout=LAST_WORDS_S)
                if not line.done():
                    line.cancel()
                    silent = (
                        "" if ended.done() else f"the engine was silent for {self._silence_timeout_s:g} s"
                    )
                    return failed or silent
                if not line.result().endswith(b"\n"):
                    return failed
                failed = self._take(msgspec.json.decode(line.result(), type=Event), began) or failed
        finally:
            ended.cancel()
            transport.close()

    @property
    def _silence_timeout_s(self) -> float | None:
        """How long an engine may be silent, in seconds: once it listens, it reports every second."""
        return self.spec.model.control.progress_timeout_s if self._url else None

    def _take(self, event: Event, began: float) -> str:
        if event.url:
            self._url = event.url
            self._max_model_len = event.max_model_len
            self._start_s = time.monotonic() - began
            if self.spec.weights is not None:
                record_read(self.spec.weights.digest)
        if event.line is not None:
            self._load = event.line.load
            self._adapters = event.line.adapters
            if event.line.state is ReplicaPhase.READY and self._state is ReplicaPhase.STARTING:
                self._ready_at = time.monotonic()
                self._become(ReplicaPhase.READY)
                self._settled.set()
            elif self._drains_for_good(event.line.state) and not self._load.in_flight:
                self._drained.set()
            # Waiting counts are as current as the last line, even if nothing else changed.
            self._waiting = tuple(
                AdapterUse(name=use.name, digest=use.digest, waiting=use.waiting)
                for use in event.uses
                if use.waiting
            )
        if event.engine is not None:
            if event.engine.preempted < self._preempted:
                # Totals of a restarted engine start at zero.
                self._preempted_before += self._preempted
            self._preempted = event.engine.preempted
            total = self._preempted_before + self._preempted
            self._engine = merge(self._engine, msgspec.structs.replace(event.engine, preempted=total))
        self._uses.extend(msgspec.structs.replace(use, waiting=0) for use in event.uses)
        return event.failed

    def _drains_for_good(self, does: ReplicaPhase) -> bool:
        """Whether the engine drains for good; one that sleeps has nothing to drain."""
        draining = self._state is ReplicaPhase.DRAINING
        return draining and does in (ReplicaPhase.DRAINING, ReplicaPhase.ASLEEP)

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
            # The head's directory exists on the head only; other nodes pull from it.
            blobs=(str(StateDir(Path(self.spec.state_dir)).adapters), str(node_cache())),
            controller=self.spec.controller,
            hold=self._hold,
        )

    def _log_progress(self, progress: Progress) -> None:
        if progress.fraction is not None or progress.step not in ("fetch", "verify"):
            # A download or build, or the wait for another process that does it.
            self._start_path = StartPath.COLD
        self._log.write(f"{progress.step}: {progress.message}\n".encode())

    async def _watch_cards(self) -> None:
        def tell(power: PowerReport | None) -> None:
            self.power = power

        gpus = self.spec.model.shapes[self.spec.shape].gpus
        await watch(devices(gpus, self._environment()), tell)

    def _environment(self) -> dict[str, str]:
        # Ray limits its workers' threads and metrics; the engine must not inherit that.
        env = {k: v for k, v in os.environ.items() if k not in _NOT_INHERITED}
        env |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}
        if self._cores:
            env["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, self._cores))
            # During a mode switch two engines share cores. With OpenMP's default spinning at barriers the
            # initialisation of a model took 154 s. This short spin costs nothing without contention
            # (28 tok/s, against 26 by default and 23 without spinning).
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
    """The log below ``root``, or below the user's own directory on a node that cannot create that."""
    try:
        return RotatingLog(StateDir(root).logs / name)
    except OSError:
        try:
            return RotatingLog(StateDir(default_root()).logs / name)
        except (OSError, RuntimeError):  # a user without a home
            return RotatingLog(private_directory() / "logs" / name)


def _status(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
