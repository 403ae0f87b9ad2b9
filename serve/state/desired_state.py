"""The desired state of each model (mode, replica count, revision), kept across restarts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from policy.config.deployment import Deployment, ModelSpec, ReplicaBounds
from policy.config.engine_revision import built_shapes, digest, same_engines, used_shapes
from policy.config.shared_gpus import gpu_group_of
from policy.errors import NotLeader, TargetError, Unreachable
from policy.scaling.decision_types import ModeOverride
from policy.scaling.reconcile_steps import LayerKey
from policy.stats.backoff import Backoff
from policy.types import EngineKind
from serve.actuator.interface import ActuatorLayer
from serve.host.weight_verification import ResolvedWeights
from store.state_dir import StateDir

log = logging.getLogger("tidegate.controller")

# How long load does not switch to a mode that failed to start.
BLOCK_BACKOFF = Backoff(120.0, 3600.0)


class DesiredMode(msgspec.Struct, frozen=True, kw_only=True):
    """A desired state: a mode, its shape at that time, a replica count, and the revision to build from.

    The shape is kept beside the mode: a later document may change or drop it while the replicas still run.
    """

    mode: str
    shape: str
    count: int
    generation: int

    @classmethod
    def of(cls, spec: ModelSpec, mode: str, generation: int, count: int | None = None) -> DesiredMode:
        """``mode`` of ``spec`` with ``count`` replicas, by default its lowest count, min 1."""
        chosen = spec.modes[mode]
        count = max(chosen.bounds.min, 1) if count is None else count
        return cls(mode=mode, shape=chosen.shape, count=count, generation=generation)

    def __str__(self) -> str:
        return f"{self.mode} x {self.count}, generation {self.generation}"


class SwitchBlock(msgspec.Struct, frozen=True, kw_only=True):
    """Load does not switch to a mode before ``until``: it failed ``attempts`` times in a row."""

    attempts: int
    until: float


class ExpectedGain(msgspec.Struct, frozen=True, kw_only=True):
    """The predicted saving (fraction ``gain`` of the cost) of a switch by load from ``was`` to ``mode``.

    ``cost`` and ``met`` were measured when it was decided, at the instant ``at``. They are measured again
    after its replicas are ready, at ``settled_at``.
    """

    at: float
    was: str
    mode: str
    gain: float
    cost: float
    met: float
    settled_at: float | None = None


class ModelTarget(msgspec.Struct, frozen=True, kw_only=True):
    """The desired state of one model (``aim``), and the ``fallback`` if it cannot be reached.

    ``created`` is when the model was first deployed, ``since`` when the aim was set; ``settled`` whether it
    was reached once. While it ``waits``, other layers drain first, the last until ``drained_at``; ``note`` is
    for operators. ``rejected`` is the digest of the configuration that was
    rolled back last, ``specs`` the configuration of each generation in use, its shapes as its layers are
    built, and ``weights`` those of each generation. ``set_mode`` and ``set_count`` are manual overrides,
    ``barred`` the modes that failed, ``promise`` the predicted gain of a switch that is not reviewed yet. A
    switch with a ``gap`` goes below ``min_healthy``; where none stays, other layers serve what ends before
    the longest request, and all ends at ``ends_at``.
    """

    aim: DesiredMode
    since: float
    created: float
    settled: bool = False
    fallback: DesiredMode | None = None
    gap: bool = False
    ends_at: float | None = None
    waits: bool = False
    drained_at: float = 0.0
    note: str = ""
    rejected: str = ""
    specs: dict[int, ModelSpec]
    weights: dict[int, ResolvedWeights] = {}
    set_mode: ModeOverride | None = None
    set_count: ModeOverride | None = None
    barred: dict[str, SwitchBlock] = {}
    promise: ExpectedGain | None = None

    @property
    def spec(self) -> ModelSpec:
        """The configuration of the desired revision."""
        return self.specs[self.aim.generation]

    def key(self, aim: DesiredMode | None = None) -> LayerKey:
        """The layer of a desired state, by default of the current one."""
        aim = aim or self.aim
        return LayerKey(self.spec.name, aim.shape, aim.generation)

    @property
    def generations(self) -> set[int]:
        """The revisions of the desired state and its fallback."""
        return {aim.generation for aim in (self.aim, self.fallback) if aim is not None}

    @property
    def bounds(self) -> ReplicaBounds:
        """The allowed replica counts; for a mode that was removed, only the present count."""
        mode = self.spec.modes.get(self.aim.mode)
        return mode.bounds if mode else ReplicaBounds(min=self.aim.count, max=max(self.aim.count, 1))

    def override(self, at: float) -> ModeOverride | None:
        """The manual override in force at ``at``: one of the count comes before one of the mode."""
        for chosen in (self.set_count, self.set_mode):
            if chosen is None or chosen.ended(at) or chosen.mode not in self.spec.modes:
                continue
            if chosen.count is None:
                return chosen
            return replace(chosen, count=self.spec.modes[chosen.mode].bounds.clamp(chosen.count))
        return None

    def blocked(self, mode: str, at: float) -> bool:
        """Whether ``mode`` failed to start recently, so that load does not switch to it."""
        return mode in self.barred and self.barred[mode].until > at

    def in_mode(self, mode: str, count: int | None = None) -> DesiredMode:
        """``mode`` of the desired revision with ``count`` replicas, by default its lowest count, min 1."""
        return DesiredMode.of(self.spec, mode, self.aim.generation, count)

    def toward(self, aim: DesiredMode, now: float, *, gap: bool = False) -> ModelTarget:
        """Set ``aim``; roll back to what served before if it fails.

        What served is the current aim once it was reached, else its own fallback. Another count of the same
        layer has no fallback, and does not extend the time to become ready.
        """
        back = self.aim if self.settled else self.fallback
        if back is not None and self.key(back) == self.key(aim):
            back = None
        since = self.since if back is not None and self.key() == self.key(aim) else now
        same = self.key() == self.key(aim)
        ends_at, waits = self.ends_at if gap and same else None, same and self.waits
        return self._aimed(aim, since, fallback=back, gap=gap, ends_at=ends_at, waits=waits)

    def _aimed(self, aim: DesiredMode, since: float, **rest: Any) -> ModelTarget:
        """A new aim that was not reached yet."""
        unreached = {"settled": False, "fallback": None, "ends_at": None, "waits": False, "note": ""}
        return replace(self, aim=aim, since=since, **unreached | rest)

    def waiting(self, waits: bool, now: float) -> ModelTarget:
        """Wait for other layers to drain, or no longer: only then the start begins."""
        return replace(self, waits=waits, drained_at=now)

    def starts_for_s(self, now: float) -> float:
        """For how many seconds it could start. The drain before, as long as requests run, does not count."""
        return 0.0 if self.waits else now - max(self.since, self.drained_at)

    def restored(self, now: float) -> ModelTarget:
        """As of a controller that starts at ``now``: without instants of a clock that was ahead.

        A failing start would not be rolled back before that time comes, nor a block end.
        """
        ends_at, promise = self.ends_at, self.promise
        if ends_at is not None:
            ends_at = min(ends_at, now + self.spec.control.mode.drain_timeout_s)
        if promise is not None and promise.settled_at is not None:
            promise = replace(promise, settled_at=min(promise.settled_at, now))
        latest = {mode: now + BLOCK_BACKOFF.delay_s(block.attempts) for mode, block in self.barred.items()}
        return replace(
            self,
            since=min(self.since, now),
            created=min(self.created, now),
            drained_at=min(self.drained_at, now),
            ends_at=ends_at,
            barred={m: replace(block, until=min(block.until, latest[m])) for m, block in self.barred.items()},
            promise=promise,
        )

    def back(self, note: str, now: float) -> ModelTarget:
        """Roll back to the fallback, and remember the configuration or mode that failed.

        Manual overrides of a mode that failed end.
        """
        assert self.fallback is not None
        target = self._aimed(self.fallback, now, gap=True, note=note, promise=None)
        mode = self.aim.mode
        if self.fallback.generation != self.aim.generation:
            return replace(target, rejected=digest(self.spec))
        attempts = 1 + (self.barred[mode].attempts if mode in self.barred else 0)
        block = SwitchBlock(attempts=attempts, until=now + BLOCK_BACKOFF.delay_s(attempts))
        overrides = {"set_mode": self.set_mode, "set_count": self.set_count}
        failed = {name: None for name, chosen in overrides.items() if chosen and chosen.mode == mode}
        return replace(target, barred=self.barred | {mode: block}, **failed)

    def reached(self) -> ModelTarget:
        """The desired state was reached: the fallback and the block of its mode are dropped."""
        barred = {mode: barred for mode, barred in self.barred.items() if mode != self.aim.mode}
        return replace(self, settled=True, fallback=None, gap=False, ends_at=None, waits=False, barred=barred)

    def adopting(self, spec: ModelSpec, now: float) -> ModelTarget:
        """Take ``spec`` as the configuration: a new generation unless one in use makes its engines.

        The count is clamped to the bounds of the mode; a removed mode is replaced by the first one.
        """
        same = [generation for generation, used in self.specs.items() if same_engines(used, spec)]
        ours = self.aim.generation
        generation = ours if ours in same else max(same, default=max(self.specs) + 1)
        before = self.specs[generation].shapes if same else {}
        mode = self.aim.mode if self.aim.mode in spec.modes else spec.first_mode
        aim = DesiredMode.of(spec, mode, generation, spec.modes[mode].bounds.clamp(self.aim.count))
        specs = self.specs | {generation: built_shapes(spec, before)}
        target = replace(self, specs=specs, rejected="")
        return target if aim == self.aim else target.toward(aim, now)

    @property
    def weights_known(self) -> bool:
        """Whether the weights of the desired revision are resolved, where its engine has any."""
        return self.spec.engine is not EngineKind.VLLM or self.aim.generation in self.weights

    def with_weights(self, found: ResolvedWeights, now: float, *, others_run: bool) -> ModelTarget:
        """Use the weights ``found``, in a new revision where replicas with others run (``others_run``)."""
        aim, target = self.aim, self
        if others_run:
            aim = replace(aim, generation=max(self.specs) + 1)
            specs = self.specs | {aim.generation: built_shapes(self.spec, {})}
            target = replace(self, specs=specs).toward(aim, now)
        return replace(target, weights=self.weights | {aim.generation: found})

    def keep_weights(self, generations: Collection[int]) -> ModelTarget:
        """Forget the weights of all other revisions: their source may have changed."""
        kept = {number: weights for number, weights in self.weights.items() if number in generations}
        return replace(self, weights=kept)

    def keeps(self, key: LayerKey) -> bool:
        """Whether the layer is desired, or a mode of a revision in use may need it again."""
        if key in (self.key(), self.fallback and self.key(self.fallback)):
            return True
        return key.generation in self.generations and key.shape in used_shapes(self.specs[key.generation])

    def pruned(self, layers: Collection[LayerKey]) -> ModelTarget:
        """Forget configurations and shapes that are no longer used."""
        in_use = self.generations | {key.generation for key in layers}
        specs = {}
        for generation in in_use & self.specs.keys():
            spec = self.specs[generation]
            keys = {shape: LayerKey(spec.name, shape, generation) for shape in spec.shapes}
            # A shared GPU group keeps all its shapes while any engine of it is there.
            group = gpu_group_of(spec)
            shapes = {
                shape: spec.shapes[shape]
                for shape, key in keys.items()
                if key in layers or self.keeps(key) or (group is not None and shape in group.engines)
            }
            specs[generation] = replace(spec, shapes=shapes)
        return replace(self, specs=specs).keep_weights(specs)


class ModelTargets:
    """All targets, saved at each change.

    A target that cannot be saved applies all the same, and is ``unsaved`` until the disk takes it: only a
    controller that is killed meanwhile forgets it.
    """

    def __init__(self, state: StateDir, event: Callable[[str], None] = log.warning) -> None:
        self._state = state
        self._event = event
        self._path = state.targets_path
        self._all = self._read()
        self._aside: dict[str, ModelTarget] = {}
        self.unsaved = False

    def _read(self) -> dict[str, ModelTarget]:
        try:
            return self._state.load(self._path, dict[str, ModelTarget]) or {}
        except msgspec.DecodeError as error:
            # Written by another version. Targets are made of the running replicas, the file is kept.
            aside = self._state.set_aside(self._path)
            log.warning("%s cannot be read (%s); kept as %s", self._path, error, aside)
            return {}

    def names(self) -> tuple[str, ...]:
        """The models, in the order in which they were first wanted."""
        return tuple(self._all)

    def get(self, model: str) -> ModelTarget:
        """The target of ``model``; raises :class:`policy.errors.TargetError` if it has none."""
        try:
            return self._all[model]
        except KeyError:
            raise TargetError(
                f"no model is called {model!r}; this deployment has {', '.join(self._all)}"
            ) from None

    @property
    def stored(self) -> frozenset[str]:
        """The models that have a target, in force or set aside."""
        return frozenset(self._all) | frozenset(self._aside)

    @property
    def stored_specs(self) -> list[ModelSpec]:
        """The configurations of all generations in use, also of models that were removed."""
        targets = (self._all | self._aside).values()
        return [spec for target in targets for spec in target.specs.values()]

    def set_aside(self, model: str) -> None:
        """Keep the target of ``model`` stored, but not in force, until :meth:`bring_back`."""
        self._aside[model] = self._all.pop(model)

    def bring_back(self, model: str) -> None:
        """Put the target of ``model`` in force again, if it was set aside."""
        if (target := self._aside.pop(model, None)) is not None:
            self._all[model] = target

    def put(self, model: str, target: ModelTarget) -> None:
        """Set and save."""
        self._all[model] = target
        self.save()

    def drop(self, model: str) -> None:
        """Forget a model whose replicas are gone."""
        self._all.pop(model, None)
        self.save()

    def save(self) -> None:
        """Write all; a failure is reported once. Raises :class:`policy.errors.NotLeader`."""
        try:
            self._state.save(self._path, self._all | self._aside)
            self.unsaved = False
        except NotLeader:
            raise
        except (OSError, Unreachable) as error:
            if not self.unsaved:
                self._event(f"targets apply, but cannot be saved for a restart: {error}")
            self.unsaved = True


def first_target(spec: ModelSpec, held: Iterable[LayerKey], now: float) -> ModelTarget:
    """The first target of a model: its first mode at its lowest count, min 1.

    Its generation is above those that are ``held``, which are of another configuration.
    """
    generation = 1 + max((key.generation for key in held if key.model == spec.name), default=0)
    aim = DesiredMode.of(spec, spec.first_mode, generation)
    return ModelTarget(aim=aim, since=now, created=now, specs={generation: built_shapes(spec, {})})


def found_target(spec: ModelSpec, held: Mapping[LayerKey, ActuatorLayer], now: float) -> ModelTarget | None:
    """A target that matches the running replicas, for a controller whose targets were lost."""
    running = [
        (layer.wanted, key)
        for key, layer in held.items()
        if key.model == spec.name
        and key.shape in spec.shapes
        and layer.digest.startswith(digest(spec, key.shape))
        and layer.wanted
    ]
    if not running:
        return None
    count, key = max(running)
    mode = next((name for name, mode in spec.modes.items() if mode.shape == key.shape), spec.first_mode)
    aim = DesiredMode(mode=mode, shape=key.shape, count=count, generation=key.generation)
    built = built_shapes(spec, {key.shape: spec.shapes[key.shape]})
    return ModelTarget(aim=aim, since=now, created=now, specs={key.generation: built})


def wanted_models(deployment: Deployment) -> list[ModelSpec]:
    """The models whose replicas Tidegate starts and ends."""
    return [spec for spec in deployment.models if spec.is_scaled]
