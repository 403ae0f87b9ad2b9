"""Engine models that are fitted to live replicas: one for each model and shape, kept on disk."""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec

from policy.config.deployment import ModelSpec
from policy.config.model_revision import engine_inputs
from policy.engine.online_calibration import Calibration, Fit, State, slowness
from policy.engine.performance_model import EngineModel
from policy.engine.step_samples import StepSample
from policy.types import Replica, ReplicaPhase
from policy.wire.heartbeat import Heartbeat
from store.state_dir import StateDir

log = logging.getLogger("tidegate.controller")

# How many of its last samples say how slow a replica is, and for how long after them that is believed.
LAST = 12
BELIEVED_S = 120.0
# What waits for a thread that fits; a fleet that tells more than this is sampled.
MAX_WAITING = 4096
SAVE_EVERY_S = 60.0


class SavedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A file: of which model, shape and engine, with the prior from which it was learned."""

    model: str
    shape: str
    engine: str
    prior: EngineModel
    state: State


class _One:
    """A calibration, and what it is of."""

    def __init__(self, saved: SavedModel) -> None:
        self.engine = saved.engine
        self.prior = saved.prior
        self.calibration = Calibration(saved.prior, saved.state)
        self.fit = self.calibration.current
        self.factor = slowness(saved.prior, self.calibration.lately)
        self.saved_version = saved.state.version
        self.changed = False

    def learn(self, told: Sequence[tuple[str, Sequence[StepSample]]]) -> None:
        """Take what replicas told of their steps, and publish what follows."""
        self.calibration.take_all(told)
        self.fit = self.calibration.current
        self.factor = slowness(self.prior, self.calibration.lately)
        self.changed = True


class CalibrationStore:
    """Learns from heartbeats. Only :meth:`learn` takes long, and may run in a thread beside the others."""

    def __init__(self, state: StateDir) -> None:
        self._state = state
        self._all: dict[tuple[str, str], _One] = {}
        self._waiting: list[tuple[ModelSpec, Replica, EngineModel, tuple[StepSample, ...]]] = []
        self._of: dict[str, deque[StepSample]] = {}
        self._heard: dict[str, float] = {}
        self._saved_at = 0.0
        self._swept_at = 0.0
        for path in sorted(state.calibrations.glob("*.json")):
            self._read(path)

    def take(
        self, beat: Heartbeat, spec: ModelSpec, prior: EngineModel, at: float, *, learns: bool = True
    ) -> None:
        """A replica of ``spec`` tells of its steps; ``prior`` is what its engine was taken to be.

        Unless it ``learns`` of them they only say how slow that replica is.
        """
        self._forget(at)
        replica = beat.replica
        if replica.state is ReplicaPhase.STOPPED:
            self._of.pop(replica.id, None)
            self._heard.pop(replica.id, None)
        elif beat.engine is not None and beat.engine.steps:
            self._of.setdefault(replica.id, deque(maxlen=LAST)).extend(beat.engine.steps)
            self._heard[replica.id] = at
            if learns and len(self._waiting) < MAX_WAITING:
                self._waiting.append((spec, replica, prior, beat.engine.steps))

    def _forget(self, at: float) -> None:
        """Let go of replicas that were killed, and could not say that they stop."""
        if at - self._swept_at < BELIEVED_S:
            return
        self._swept_at = at
        for gone in [name for name, heard_at in self._heard.items() if at - heard_at > BELIEVED_S]:
            del self._heard[gone], self._of[gone]

    @property
    def waiting(self) -> bool:
        """Whether there is anything to learn."""
        return bool(self._waiting)

    def learn(self, at: float) -> None:
        """Fit what was taken, and save what has changed; not for an event loop."""
        waiting, self._waiting = self._waiting, []
        together: dict[tuple[str, str], list[tuple[str, Sequence[StepSample]]]] = {}
        for spec, replica, prior, samples in waiting:
            shape = replica.shape
            key = (spec.name, shape)
            engine = _engine(spec, shape)
            if key not in self._all or self._all[key].engine != engine:
                together.pop(key, None)
                state = Calibration(prior).state
                saved = SavedModel(model=spec.name, shape=shape, engine=engine, prior=prior, state=state)
                self._all = self._all | {key: _One(saved)}
            together.setdefault(key, []).append((replica.id, samples))
        for key, learned in together.items():
            self._all[key].learn(learned)
        due = at - self._saved_at >= SAVE_EVERY_S
        for key, one in self._all.items():
            if one.changed and (due or one.fit.version != one.saved_version):
                self._save(key, one)
        if due:
            self._saved_at = at

    def fitted(self, spec: ModelSpec, shape: str) -> Fit | None:
        """What was fitted to the engines that ``spec`` builds of ``shape``, if anything was."""
        one = self._all.get((spec.name, shape))
        return one.fit if one is not None and one.fit.version and one.engine == _engine(spec, shape) else None

    def assumed(self, spec: ModelSpec, shape: str, prior: EngineModel) -> EngineModel | None:
        """What to assume of a shape that is not measured now: as far from its prior as the others are.

        ``None`` where no other was ever measured.
        """
        factors = [
            one.factor
            for (model, other), one in self._all.items()
            if model == spec.name
            and other != shape
            and one.fit.version
            and one.engine == _engine(spec, other)
        ]
        return prior.faster(1.0 / sorted(factors)[len(factors) // 2]) if factors else None

    def slowness(self, replica: str, model: EngineModel | None, at: float) -> float:
        """How many times as long as ``model`` says its steps take; 1 where it has not made any of late."""
        samples = self._of.get(replica)
        if model is None or not samples or at - self._heard[replica] > BELIEVED_S:
            return 1.0
        return slowness(model, list(samples))

    def _read(self, path: Path) -> None:
        try:
            saved = self._state.load(path, SavedModel)
        except (msgspec.MsgspecError, OSError) as error:
            log.warning("%s cannot be read (%s); it is measured anew", path, error)
            return
        if saved is not None:
            self._all[saved.model, saved.shape] = _One(saved)

    def _save(self, key: tuple[str, str], one: _One) -> None:
        model, shape = key
        name = f"{model.replace('/', '@')}+{shape}.json"
        saved = SavedModel(
            model=model, shape=shape, engine=one.engine, prior=one.prior, state=one.calibration.state
        )
        try:
            self._state.calibrations.mkdir(mode=0o700, exist_ok=True)
            self._state.save(self._state.calibrations / name, saved)
        except OSError as error:
            log.warning("%s: %s", name, error)
            return
        one.saved_version, one.changed = one.fit.version, False


def _engine(spec: ModelSpec, shape: str) -> str:
    """Eight hex digits over what an engine's speed may depend on."""
    made = engine_inputs(spec)
    # How long it may drain is a host's business.
    del made["control"]
    data = msgspec.json.encode((made, spec.shapes.get(shape)), order="deterministic")
    return hashlib.sha256(data).hexdigest()[:8]
