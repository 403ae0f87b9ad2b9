"""A calibration of live replicas: load points, the step times that engines report, and the fit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import NamedTuple

import msgspec
import uvloop

from policy.config.deployment import Deployment, ModelSpec
from policy.engine.builtin_profiles import shipped
from policy.engine.performance_model import BatchLimits, EngineModel, MeanLatencySlo
from policy.engine.performance_model_file import FORMAT, PerformanceModelFile
from policy.engine.step_samples import StepSample
from policy.errors import PreconditionFailed, TargetError, TidegateError
from policy.routing.settings import START_SHARE
from policy.types import EngineKind, Replica, ReplicaPhase, Runner
from policy.wire.controller_reports import EngineReport
from serve.controller.client import ControllerClient
from serve.host.version_check import installed
from sim.calibration.experiment_design import CalibrationPoint, PlannedPoints, plan_points, share_time
from sim.calibration.fit import LoadPointObservation, fit_model, initial_guess
from tidegate.calibrate.load_driver import CalibrationLoad
from tidegate.replay.endpoint_api import RequestFormat, probe
from tidegate.replay.http_client import ReplayConnectionPool
from tidegate.replay.prompts import PromptGenerator

# Engines report a step within this time: twice a second through the host, or ten times themselves.
SETTLED_S = 1.0


class StepListener:
    """Collects step samples in a thread; keeps the last hardware and limits that engines reported."""

    def __init__(self, client: ControllerClient, model: str) -> None:
        self._client = client
        self._model = model
        self._lock = threading.Lock()
        self._samples: list[StepSample] = []
        self._error: TidegateError | None = None
        self._listening = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self.hardware = ""
        self.limits: BatchLimits | None = None
        self.shapes: set[str] = set()

    def __enter__(self) -> StepListener:
        """Returns once it listens; raises the controller's error."""
        self._thread.start()
        self._listening.wait()
        self.check()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()

    def check(self) -> None:
        """Raise the error that ended it, if any."""
        if self._error is not None:
            raise self._error

    def take(self) -> list[StepSample]:
        """The steps since the last call; raises as :meth:`check` does."""
        self.check()
        with self._lock:
            taken, self._samples = self._samples, []
        return taken

    def _listen(self) -> None:
        try:
            for line in self._client.steps(self._model):
                if line.engine is not None:
                    self._add(line.shape, line.engine)
                self._listening.set()
                if self._stopped.is_set():
                    return
        except TidegateError as error:
            self._error = error
        finally:
            self._listening.set()

    def _add(self, shape: str, engine: EngineReport) -> None:
        with self._lock:
            self._samples += engine.steps
            self.shapes.add(shape)
            self.hardware = engine.hardware
            if engine.timing is not None:
                self.limits = engine.timing.limits


# Load points that give an estimate of the step times before the others are chosen.
WARM_UP = (
    CalibrationPoint(1, 16, 32),
    CalibrationPoint(4, 16, 32),
    CalibrationPoint(16, 16, 32),
    CalibrationPoint(1, 192, 4),
)
WARM_UP_PART = 0.04
# Engines drop a cancelled request after its step. With other clients they never become idle.
MAX_SETTLING_S = 10.0
POLL_S = 0.1
# The replica count is overridden for this much longer than the expected calibration.
LATE_S = 120.0

# Called with the finished load points, their total, and the next one (empty at the end).
Progress = Callable[[int, int, str], None]


class ServedShape(NamedTuple):
    """What is calibrated: the ready replicas of one shape, and the performance model assumed so far."""

    spec: ModelSpec
    shape: str
    degree: int
    replicas: int
    max_model_len: int
    prior: EngineModel
    limits: BatchLimits
    name: str


def served_shape(
    client: ControllerClient, deployment: Deployment, model: str, shape: str | None
) -> ServedShape:
    """The shape that serves ``model`` now.

    Raises :class:`policy.errors.TargetError` for a model that cannot be calibrated or another ``shape``, and
    :class:`policy.errors.PreconditionFailed` while it changes.
    """
    spec = deployment.model(model)
    if spec.engine is EngineKind.EXTERNAL:
        raise TargetError(f"{model} is external: its servers report no steps")
    if spec.runner is not Runner.GENERATE:
        raise TargetError(f"{model} writes no text: its engine makes no steps to calibrate")
    status = next((each for each in client.status().models if each.name == model), None)
    if status is None:
        raise TargetError(f"{model} is in the deployment file, but the controller does not know it")
    if shape is not None and shape != status.shape:
        raise TargetError(
            f"{model}: replicas of shape {status.shape} serve, and none of {shape}; see `tidegate mode`"
        )
    ready = [r for r in client.fleet().replicas if r.model == model and r.state is ReplicaPhase.READY]
    if not ready or status.phase != "steady":
        raise PreconditionFailed(
            f"{model} is {status.phase}, with {len(ready)} replicas ready: wait until it is steady"
        )
    return _of(spec, status.shape, ready)


def _of(spec: ModelSpec, shape: str, ready: list[Replica]) -> ServedShape:
    made = spec.shapes[shape]
    degree = max(1, int(made.degree))
    timing = shipped(spec, made)
    prior = timing.model
    assert prior is not None
    if prior.degree != degree:  # unknown, so its scaling with the degree is, too
        k = degree / prior.degree
        prior = msgspec.structs.replace(prior, w=prior.w * k, c=prior.c * k, g=prior.g * k, degree=degree)
    lengths = [replica.max_model_len for replica in ready if replica.max_model_len]
    name = spec.timed_by or ""
    return ServedShape(
        spec=spec,
        shape=shape,
        degree=degree,
        replicas=len(ready),
        max_model_len=min(lengths, default=timing.limits.max_num_batched_tokens),
        prior=prior,
        limits=timing.limits,
        name=name if isinstance(name, str) else str(name.get("prior", "")),
    )


@dataclass(frozen=True)
class CalibrationRun:
    """One run against the gateway at ``url``; ``warn`` receives problems that do not end it."""

    client: ControllerClient
    subject: ServedShape
    url: str
    key: str
    seed: int
    progress: Progress
    warn: Callable[[str], None]

    def run(self, seconds: float, at: str) -> PerformanceModelFile:
        """Calibrate for about ``seconds``, at a fixed replica count; ``at`` is the timestamp of the file."""
        name = self.subject.spec.name
        status = next(each for each in self.client.status().models if each.name == name)
        if status.override is not None:
            return uvloop.run(self._run(seconds, at))
        self.client.scale(name, status.target, seconds + LATE_S)
        try:
            return uvloop.run(self._run(seconds, at))
        finally:
            self.client.scale(name, None)

    async def _run(self, seconds: float, at: str) -> PerformanceModelFile:
        subject, pool = self.subject, ReplayConnectionPool(self.url, self.key)
        try:
            with StepListener(self.client, subject.spec.name) as listener:
                observations = await self._drive_points(pool, listener, seconds)
        finally:
            pool.close()
        if listener.shapes != {subject.shape}:
            raise PreconditionFailed(
                f"replicas of {' and '.join(sorted(listener.shapes)) or 'no shape'} reported steps,"
                f" where {subject.shape} was to be calibrated: calibrate again"
            )
        limits = listener.limits or subject.limits
        found = fit_model(observations, subject.prior, limits)
        versions = installed()
        kind = subject.spec.engine
        return PerformanceModelFile(
            format=FORMAT,
            model=subject.spec.name,
            shape=subject.shape,
            degree=subject.degree,
            engine=f"vllm {versions.vllm}" if kind is EngineKind.VLLM else str(kind),
            hardware=listener.hardware,
            tidegate=versions.tidegate,
            at=at,
            engine_model=found.model,
            limits=limits,
            max_model_len=subject.max_model_len,
            path_s=found.path_s,
            error=found.error,
            steps=sum(each.steps for each in observations),
            points=found.points,
            prior=subject.name,
            prior_model=subject.prior,
            note=found.note,
        )

    async def _drive_points(
        self, pool: ReplayConnectionPool, listener: StepListener, seconds: float
    ) -> list[LoadPointObservation]:
        subject = self.subject
        request_format, fit = await probe(pool, RequestFormat(subject.spec.name), self.seed)
        if not request_format.exact:
            self.warn("the engine takes no `ignore_eos`: answers are as long as the model makes them")
        driver = CalibrationLoad(pool, request_format, PromptGenerator(self.seed, fit))
        for point in WARM_UP:
            await driver.drive(point, subject.replicas, asyncio.sleep(WARM_UP_PART * seconds))
        await self._wait_until_settled()
        model = initial_guess(listener.take(), subject.prior)
        left_s = seconds * (1.0 - len(WARM_UP) * WARM_UP_PART)
        points, point_s = self._plan_points(model, listener.limits or subject.limits, left_s)
        observations: list[LoadPointObservation] = []
        for number, point in enumerate(points):
            self.progress(number, len(points), point.description)
            driven = await driver.drive(point, subject.replicas, asyncio.sleep(point_s))
            if driven.refused:
                self.warn(f"{point.description}: {driven.refused}")
            await self._wait_until_settled()
            observations.append(
                LoadPointObservation(driven.point, driven.seconds, listener.take(), driven.latencies)
            )
        self.progress(len(points), len(points), "")
        return observations

    async def _wait_until_settled(self) -> None:
        """Wait until engines have dropped the cancelled requests and reported their steps."""
        name, started = self.subject.spec.name, perf_counter()
        while perf_counter() - started < MAX_SETTLING_S:
            fleet = await asyncio.to_thread(self.client.fleet)
            loads = [replica.load for replica in fleet.replicas if replica.model == name]
            if not any(load.in_flight or load.running for load in loads):
                break
            await asyncio.sleep(POLL_S)
        await asyncio.sleep(SETTLED_S)

    def _plan_points(self, model: EngineModel, limits: BatchLimits, seconds: float) -> PlannedPoints:
        """The load points that share ``seconds``, without those that would miss the SLO."""
        spec = self.subject.spec
        bound = spec.shapes[self.subject.shape].max_in_flight or limits.max_num_seqs
        length = self.subject.max_model_len

        def within(slo: MeanLatencySlo, point_s: float) -> list[CalibrationPoint]:
            return plan_points(model, limits, max_model_len=length, bound=bound, point_s=point_s, slo=slo)

        found = share_time(partial(within, _slo(spec)), seconds, SETTLED_S)
        every = within(MeanLatencySlo(), found.point_s)
        if left_out := len(every) - len(found.points):
            self.warn(
                f"{left_out} of {len(every)} load points are left out: the gateway would queue requests that"
                f" miss the SLO of {spec.name}. Without `control.slo` they are driven, too"
            )
        return found


def _slo(spec: ModelSpec) -> MeanLatencySlo:
    """The SLO beyond which the gateway queues requests, so that no engine sees the load point."""
    slo, whole = spec.control.slo, MeanLatencySlo()
    return MeanLatencySlo(
        ttft_s=whole.ttft_s if slo.ttft_p95_s is None else START_SHARE * slo.ttft_p95_s,
        itl_s=whole.itl_s if slo.itl_p95_s is None else slo.itl_p95_s,
    )
