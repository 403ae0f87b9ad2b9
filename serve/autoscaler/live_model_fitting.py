"""Engine models that are fitted to live replicas: one for each model and shape, kept on disk."""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_high

import msgspec
from msgspec.structs import replace

from policy.config.deployment import ModelSpec
from policy.config.engine_revision import engine_inputs
from policy.engine.online_calibration import Calibration, CalibrationFit, CalibrationState, slowness
from policy.engine.performance_model import EngineModel
from policy.engine.step_samples import StepSample
from policy.types import Replica, ReplicaPhase
from policy.wire.heartbeat import Heartbeat
from store.state_dir import StateDir

log = logging.getLogger("tidegate.controller")

# The slowness of a replica is that of its last samples, and is valid for so many seconds after the last one.
LAST = 12
VALID_S = 120.0
# Maximum reports that wait for the thread that fits; beyond that a large fleet is sampled.
MAX_WAITING = 4096
SAVE_EVERY_S = 60.0


@dataclass(slots=True)
class _RecentSamples:
    """The last samples of a replica, and when it reported them."""

    at: float
    samples: deque[StepSample] = field(default_factory=lambda: deque(maxlen=LAST))


class SavedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A calibration file: its model, shape and engine, and the prior from which it was learned."""

    model: str
    shape: str
    engine: str
    prior: EngineModel
    state: CalibrationState


class _CalibratedModel:
    """A calibration, and the version that was saved last."""

    def __init__(self, saved: SavedModel) -> None:
        self.saved = saved
        self.saved_version = saved.state.version
        self.calibration = Calibration(saved.prior, saved.state)
        self.changed = False
        self._publish()

    def learn(self, samples: Sequence[tuple[str, Sequence[StepSample]]]) -> None:
        """Fit the samples of replicas, and publish the result."""
        self.calibration.take_all(samples)
        self.changed = True
        self._publish()

    def _publish(self) -> None:
        self.fit = self.calibration.current
        self.factor = slowness(self.saved.prior, self.calibration.lately)


class CalibrationStore:
    """Learns from heartbeats. Only :meth:`learn` takes long, and may run in a thread beside the others."""

    def __init__(self, state: StateDir) -> None:
        self._state = state
        self._all: dict[tuple[str, str], _CalibratedModel] = {}
        self._waiting: list[tuple[ModelSpec, Replica, EngineModel, tuple[StepSample, ...]]] = []
        self._recent: dict[str, _RecentSamples] = {}
        self._saved_at = 0.0
        self._swept_at = 0.0
        for path in sorted(state.calibrations.glob("*.json")):
            self._read(path)

    def take(
        self, beat: Heartbeat, spec: ModelSpec, prior: EngineModel, at: float, *, learns: bool = True
    ) -> None:
        """Take the steps that a replica of ``spec`` reports; ``prior`` is the assumed model of its engine.

        Without ``learns`` they are only used for the slowness of that replica.
        """
        if at - self._swept_at >= VALID_S:
            # Replicas that were killed send no last heartbeat.
            self._swept_at = at
            recent = self._recent.items()
            self._recent = {name: last for name, last in recent if at - last.at <= VALID_S}
        replica = beat.replica
        if replica.state is ReplicaPhase.STOPPED:
            self._recent.pop(replica.id, None)
        elif beat.engine is not None and beat.engine.steps:
            last = self._recent.setdefault(replica.id, _RecentSamples(at))
            last.at = at
            last.samples.extend(beat.engine.steps)
            if learns and len(self._waiting) < MAX_WAITING:
                self._waiting.append((spec, replica, prior, beat.engine.steps))

    def learn(self, at: float) -> None:
        """Fit the samples that were taken, and save changed models; not for an event loop."""
        waiting, self._waiting = self._waiting, []
        by_key: dict[tuple[str, str], list[tuple[str, Sequence[StepSample]]]] = {}
        for spec, replica, prior, samples in waiting:
            shape = replica.shape
            key = (spec.name, shape)
            engine = _engine(spec, shape)
            if key not in self._all or self._all[key].saved.engine != engine:
                by_key.pop(key, None)
                state = Calibration(prior).state
                saved = SavedModel(model=spec.name, shape=shape, engine=engine, prior=prior, state=state)
                self._all = self._all | {key: _CalibratedModel(saved)}
            by_key.setdefault(key, []).append((replica.id, samples))
        for key, learned in by_key.items():
            self._all[key].learn(learned)
        due = at - self._saved_at >= SAVE_EVERY_S
        for known in self._all.values():
            if known.changed and (due or known.fit.version != known.saved_version):
                self._save(known)
        if due:
            self._saved_at = at

    def fitted(self, spec: ModelSpec, shape: str) -> CalibrationFit | None:
        """The engine model fitted to the engines that ``spec`` builds of ``shape``, if any."""
        known = self._all.get((spec.name, shape))
        return known.fit if known is not None and _is_fitted(known, spec) else None

    def assumed(self, spec: ModelSpec, shape: str, prior: EngineModel) -> EngineModel | None:
        """The prior, corrected as the other shapes were on the median; ``None`` if none was measured."""
        factors = [
            known.factor
            for (model, other), known in self._all.items()
            if model == spec.name and other != shape and _is_fitted(known, spec)
        ]
        return prior.faster(1.0 / median_high(factors)) if factors else None

    def slowness(self, replica: str, model: EngineModel | None, at: float) -> float:
        """The measured duration of the replica's steps by that of ``model``; 1 without recent steps."""
        last = self._recent.get(replica)
        if model is None or last is None or at - last.at > VALID_S:
            return 1.0
        return slowness(model, list(last.samples))

    def _read(self, path: Path) -> None:
        try:
            saved = self._state.load(path, SavedModel)
        except (msgspec.MsgspecError, OSError) as error:
            log.warning("%s cannot be read (%s); it is measured again", path, error)
            return
        if saved is not None:
            self._all[saved.model, saved.shape] = _CalibratedModel(saved)

    def _save(self, known: _CalibratedModel) -> None:
        saved = replace(known.saved, state=known.calibration.state)
        name = f"{saved.model.replace('/', '@')}+{saved.shape}.json"
        try:
            self._state.calibrations.mkdir(mode=0o700, exist_ok=True)
            self._state.save(self._state.calibrations / name, saved)
        except OSError as error:
            log.warning("%s: %s", name, error)
            return
        known.saved_version, known.changed = known.fit.version, False


def _is_fitted(known: _CalibratedModel, spec: ModelSpec) -> bool:
    """Whether it is fitted to the engines that ``spec`` builds."""
    return bool(known.fit.version) and known.saved.engine == _engine(spec, known.saved.shape)


def _engine(spec: ModelSpec, shape: str) -> str:
    """Eight hex digits of a digest of all that the speed of an engine may depend on."""
    made = engine_inputs(spec)
    # Sleep mode does not change the speed.
    made.pop("control", None)
    data = msgspec.json.encode((made, spec.shapes.get(shape)), order="deterministic")
    return hashlib.sha256(data).hexdigest()[:8]
