"""The controller: observed layers -> planner step -> actuator, once a tick.

The composition root of the control plane. All its state can be rebuilt: targets from the state directory,
layers from the actuator, replicas from heartbeats.
This module is over 400 lines: it composes the parts of the control plane.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING

from msgspec.structs import replace

from policy.config.deployment import Deployment, ModelSpec
from policy.config.engine_revision import digest
from policy.deployment_file.parse import parse
from policy.errors import ActuatorFailed, SwitchRefused, TargetError, TidegateError, Unreachable
from policy.scaling.decision_types import ModeOverride
from policy.scaling.reconcile_steps import Layer, LayerKey, reached, verdict
from policy.signals.aggregator import SignalAggregator
from policy.types import FleetSnapshot, Replica, ReplicaPhase
from policy.wire.controller_reports import GatewayReport, GpuReport, ReportAnswer
from policy.wire.heartbeat import Heartbeat, HeartbeatResponse, Timeouts
from serve.actuator.by_engine import ActuatorByEngine
from serve.actuator.interface import Actuator, ActuatorLayer
from serve.actuator.placement_feasibility import check_placeable
from serve.actuator.shared_gpu_actuator import SharedGpuActuator
from serve.adapters.controller import AdapterController
from serve.async_waiting import wait_at_most
from serve.autoscaler.autoscaler import Autoscaler
from serve.autoscaler.gpu_fault_replacement import ReplicaReplacement
from serve.autoscaler.policies import PolicyInstances, make_policies
from serve.autoscaler.step_report_subscribers import StepLine, StepSubscribers
from serve.change_audit import ChangeAudit
from serve.controller.live_page_state import GatewayWorkerDetails, LiveState, live_state
from serve.controller.metrics import ControllerMetrics
from serve.controller.model_status import fleet_models, model_status, unknown_status
from serve.controller.replica_liveness_probe import probe_silent
from serve.controller_api_schema import ControllerStatus, ModelStatus
from serve.host.weight_verification import WeightsResolver
from serve.state.desired_state import ModelTarget, ModelTargets, first_target, found_target, wanted_models
from serve.state.generation_weights import GenerationWeights
from serve.state.observed_state import ObservedState
from serve.state.reconcile_errors import ModelFailures, describe
from serve.state.replica_registry import ReplicaRegistry
from store.state_dir import StateDir

if TYPE_CHECKING:
    from serve.adapters.adapter_store import AdapterStore  # imports the database, which takes long

log = logging.getLogger("tidegate.controller")

TICK_S = 0.2
# Four heartbeat intervals: until then a restarted controller does not know the running replicas.
LISTEN_S = 2.0
# Hosts may first wait for an answer of the leader before.
ELECTED_LISTEN_S = 5.0
RETRY_S = 1.0
# Half of what a client waits for an answer.
RESTORED_WITHIN_S = 5.0
EVENTS_KEPT = 100


class Controller:
    """Holds the targets and the observed fleet, and moves the fleet towards the targets."""

    def __init__(
        self,
        actuator: Actuator,
        state: StateDir,
        pid: int,
        open_adapters: Callable[[], AdapterStore],
        *,
        wall: Callable[[], float],
        monotonic: Callable[[], float],
        term: int = 0,
        by_engine: ActuatorByEngine | None = None,
    ) -> None:
        """``term`` is that of an elected controller; ``by_engine`` knows which part of ``actuator`` fails."""
        self._term = term
        self._by_engine = by_engine
        self._listen_s = ELECTED_LISTEN_S if term else LISTEN_S
        self._state = state
        self._pid = pid
        self._wall = wall
        self._monotonic = monotonic
        self._epoch = wall()
        self._listen_until = monotonic() + self._listen_s
        self._restored = asyncio.Event()
        self._all_reported = asyncio.Event()
        self._events: deque[str] = deque(maxlen=EVENTS_KEPT)
        self._failures = ModelFailures(self._event)
        self._targets = ModelTargets(state, self._event)
        # Models whose targets are not in force, as it is not known what runs of them.
        self._unrestored: dict[str, ModelSpec] = {}
        self.audit = ChangeAudit(state, wall)
        self.registry = ReplicaRegistry(self._epoch, term)
        self.aggregator = SignalAggregator()
        self.subscribers = StepSubscribers()
        self._details = GatewayWorkerDetails()
        self._observed = ObservedState(
            self.registry, self._targets, lambda model: self.aggregator.drain_s(model, monotonic())
        )
        self._replacement = ReplicaReplacement(self.registry, self._observed, monotonic, self._event)
        self._actuator = SharedGpuActuator(actuator, state, self.registry.of, self._replacement.is_unhealthy)
        self._wake = asyncio.Event()
        self._weights = GenerationWeights(
            self._observed, WeightsResolver(monotonic, self._wake.set), self._event
        )
        self._deployment = parse(state.load(state.deployment_path, dict[str, object]))
        self.autoscaler = Autoscaler(
            state, self._targets, self._observed, self.aggregator,
            now=monotonic, epoch=self._epoch - monotonic(),
            set_target=self._set_target, wake=self._wake.set, event=self._event, failures=self._failures,
        )  # fmt: skip
        self.adapters = AdapterController(
            open_adapters, self.registry, state, self._epoch, term,
            slots=self._adapter_slots, wall=wall, monotonic=monotonic, event=self._event,
            failures=self._failures,
        )  # fmt: skip
        self.adapters.declare(self._deployment, applied=False)
        self.metrics = ControllerMetrics(
            self._targets, self._observed, self._failures, self.aggregator, self.autoscaler, self.adapters,
            budget=lambda: self._deployment.budget, now=monotonic,
        )  # fmt: skip

    # What the HTTP API calls.

    def fleet(self) -> FleetSnapshot:
        """The fleet now."""
        return self.registry.fleet(self._wall())

    async def wait_for_reports(self) -> None:
        """Return once running replicas have had the time to send a heartbeat.

        A snapshot of a restarted controller before that would remove them from the gateways.
        """
        await wait_at_most(self._all_reported, self._listen_s)

    async def wait_until_restored(self) -> None:
        """Return once the models of the deployment are known, which a change needs.

        Raises :class:`policy.errors.Unreachable` after :data:`RESTORED_WITHIN_S`.
        """
        if not await wait_at_most(self._restored, RESTORED_WITHIN_S):
            raise Unreachable("the controller has just started and still reads what runs; try again")

    def status(self) -> ControllerStatus:
        """The status of each model."""
        return ControllerStatus(
            actuator=self._actuator.name,
            epoch=self._epoch,
            pid=self._pid,
            models=(
                *(self._model_status(name) for name in self._targets.names()),
                *(unknown_status(each, self._failures.note(each.name)) for each in self._unrestored.values()),
            ),
            events=tuple(self._events),
        )

    def document(self) -> dict[str, object]:
        """The deployment file in force, as JSON."""
        return self._state.load(self._state.deployment_path, dict[str, object]) or {}

    def gpus(self) -> dict[str, GpuReport]:
        """The last report on the GPUs of each replica that has some, by its id."""
        return self.aggregator.gpus(self._monotonic())

    def beat(self, beat: Heartbeat) -> HeartbeatResponse:
        """Take a heartbeat of a replica host; returns its orders."""
        replica, orders = beat.replica, HeartbeatResponse()
        # First: a replica whose heartbeats were refused would be given up.
        changed = self.registry.put(replica, self._monotonic())
        with self._failures.recorded(replica.model, "heartbeat"):
            self._observed.note(replica, self._monotonic())
            self.aggregator.take_beat(beat, self._monotonic())
            self.autoscaler.situations.note(beat)
            self._replacement.beat(beat)
            self.subscribers.publish(beat)
            if changed:
                self._event(
                    f"{replica.id}: {replica.state}" + (f" ({replica.reason})" if replica.reason else "")
                )
                self._wake.set()
                if self._observed.is_short(LayerKey.of(replica)):
                    self.autoscaler.decide_soon(replica.model)
            orders = replace(self.adapters.beat(beat), gpus=self._actuator.order(replica))
        timeouts, leave = self._timeouts(replica), self._replacement.leave(replica)
        return replace(orders, timeouts=timeouts, leave=leave, term=self._term)

    def signals(self, report: GatewayReport) -> ReportAnswer:
        """Take the counts that a gateway worker reports."""
        self.aggregator.take(report, self._monotonic())
        self.autoscaler.take_report(report)
        return ReportAnswer(wants_detail=self._details.take(report, self._monotonic()))

    def live(self) -> LiveState:
        """The state of all models for those who watch; gateway workers report details from now on."""
        return live_state(
            self.status(),
            self.fleet().replicas,
            decisions=self.autoscaler.latest,
            situations=self.autoscaler.decided_on,
            budget=self._deployment.budget,
            details=self._details,
            at=self._wall(),
            now=self._monotonic(),
        )

    def steps(self, model: str) -> AsyncIterator[StepLine]:
        """Step reports of the engines of ``model`` from now on; raises :class:`TargetError`."""
        return self.subscribers.listen(self._target(model).spec.name)

    def scale(self, model: str, replicas: int | None, for_s: float | None = None) -> ModelStatus:
        """Override the replica count (``None`` clears it); raises :class:`TargetError` outside its bounds."""
        target = self._target(model)
        if replicas is None:
            self._set_target(model, replace(target, set_count=None))
        else:
            bounds = target.bounds
            if replicas != bounds.clamp(replicas):
                expected = f"{bounds.min} to {bounds.max}" if bounds.min < bounds.max else str(bounds.max)
                raise TargetError(
                    f"{model}: {replicas} replicas in mode {target.aim.mode}, expected {expected}"
                    f" (models.{model}.modes.{target.aim.mode}.replicas)"
                )
            aim = replace(target.aim, count=replicas)
            chosen = ModeOverride(mode=aim.mode, count=replicas, until=self._until(for_s))
            toward = target.toward(aim, self.autoscaler.at, gap=target.gap) if aim != target.aim else target
            self._set_target(model, replace(toward, set_count=chosen))
        self.autoscaler.decide_soon(model, urgent=True)
        return self._model_status(model)

    def overridden(self, model: str) -> dict[str, object]:
        """What a user set of a model, and its mode and count now; raises :class:`TargetError`."""
        target = self._target(model)
        return {
            "mode": target.aim.mode,
            "replicas": target.aim.count,
            "set_mode": target.set_mode,
            "set_replicas": target.set_count,
        }

    def mode(self, model: str, mode: str | None, for_s: float | None = None) -> ModelStatus:
        """Override the mode (at its lowest count); ``None`` clears the override.

        Raises :class:`SwitchRefused` where requests would wait too long, or the budget has no room.
        """
        target = self._target(model)
        if mode is None:
            self._set_target(model, replace(target, set_mode=None))
        elif mode not in target.spec.modes:
            raise TargetError(f"{model}: mode {mode!r}, expected one of {', '.join(target.spec.modes)}")
        else:
            chosen = ModeOverride(mode=mode, until=self._until(for_s))
            if mode != target.aim.mode:
                target = target.toward(target.in_mode(mode), self.autoscaler.at)
                self.autoscaler.check_budget(target, self._deployment)
                # A count that was set for the other mode does not apply to this one.
                target = replace(self._observed.planned(target, self._deployment), set_count=None)
            self._set_target(model, replace(target, set_mode=chosen))
        self.autoscaler.decide_soon(model, urgent=True)
        return self._model_status(model)

    def prepare(self, document: dict[str, object]) -> dict[str, PolicyInstances]:
        """The slow part of :meth:`apply`; raises :class:`ConfigError`. Not for an event loop."""
        return make_policies(parse(document), self._event)

    async def check_placeable(self, document: dict[str, object]) -> None:
        """Raise :class:`ConfigError` for a shape that is larger than any node."""
        check_placeable(parse(document), await self._actuator.nodes())

    def apply(
        self, document: dict[str, object], policies: dict[str, PolicyInstances] | None = None
    ) -> ControllerStatus:
        """Apply a new deployment, of which ``policies`` may be prepared, whole or not at all.

        Raises :class:`ConfigError` for an invalid one, and :class:`SwitchRefused` for a new revision during
        whose start requests would wait too long.
        """
        deployment = parse(document)
        policies = self.prepare(document) if policies is None else policies
        wanted = {spec.name: spec for spec in wanted_models(deployment)}
        known = self._targets.names()
        unknown = {
            name: spec
            for name, spec in wanted.items()
            if name in self._unrestored or (name not in known and self._layer_failure(spec))
        }
        targets = {
            name: self._adopted(spec, deployment) for name, spec in wanted.items() if name not in unknown
        }
        self._state.save(self._state.deployment_path, document)
        self.autoscaler.adopt(policies)
        self._deployment = deployment
        for name in self._unrestored.keys() - wanted.keys() - self._targets.stored:
            del self._unrestored[name]
            self._failures.forget(name)
        self._unrestored |= unknown
        self._declare()
        for name, target in targets.items():
            # Failed modes are tried again: the cause may be fixed. A running switch keeps its note.
            note = "" if target.settled else target.note
            self._set_target(name, replace(target, barred={}, note=note))
            self._weights.invalidate(name)
        self.adapters.declare(deployment, applied=True)
        self._event("a new deployment was applied")
        return self.status()

    # The loop.

    async def run(self) -> None:
        """Run ticks until cancelled."""
        await self.rebuild()
        probing = asyncio.create_task(
            probe_silent(self.registry, self._state.secret(), self._lost, self._hung, self._monotonic)
        )
        adapting = asyncio.create_task(self.adapters.run())
        measuring = asyncio.create_task(self.metrics.measure_lag())
        try:
            while True:
                began = self._monotonic()
                try:
                    await self.tick()
                except Exception as error:
                    # Nothing stops the control loop: a full disk, a cluster that is away, or a fault of ours.
                    if not isinstance(error, (TidegateError, OSError)):
                        log.exception("a tick failed")
                    self._event(describe(error))
                    await asyncio.sleep(RETRY_S)
                self.metrics.ticked(self._monotonic() - began)
                if self._failures.take():
                    await asyncio.sleep(RETRY_S)
                await wait_at_most(self._wake, TICK_S)
                self._wake.clear()
        finally:
            probing.cancel()
            adapting.cancel()
            measuring.cancel()

    async def rebuild(self) -> None:
        """Restore counts and revisions from the actuator's layers."""
        self._declare()
        self._observed.held = await self._layers_once_known()
        await self.autoscaler.restore(self._deployment)
        stored = {name: self._targets.get(name).spec for name in self._targets.names()}
        for name in stored:
            self._targets.set_aside(name)
        self._unrestored = stored | {spec.name: spec for spec in wanted_models(self._deployment)}
        self._restore()
        self._restored.set()

    def _restore(self) -> None:
        """Put the targets of models in force of which it is known what runs; the others wait for that."""
        wanted = {spec.name: spec for spec in wanted_models(self._deployment)}
        known: list[str] = []
        for name, spec in tuple(self._unrestored.items()):
            with self._failures.recorded(name, "restoring the target"):
                if failure := self._layer_failure(spec):
                    raise ActuatorFailed(failure)
                del self._unrestored[name]
                known.append(name)
                self._bring_back(name)
        # After all of them: what one may hold depends on what the others do.
        for name in known:
            with self._failures.recorded(name, "restoring the target"):
                if name in wanted:
                    self._continue_with(wanted[name])
        if known and self._restored.is_set():
            # The replicas of these have not had the time to report yet.
            self._listen_until = self._monotonic() + self._listen_s

    def _bring_back(self, name: str) -> None:
        self._targets.bring_back(name)
        if name in self._targets.names():
            running = {key.generation for key in self._observed.held if key.model == name}
            target = self._targets.get(name).keep_weights(running)
            self._targets.put(name, target.restored(self.autoscaler.at))

    def _continue_with(self, spec: ModelSpec) -> None:
        held, now = self._observed.held, self.autoscaler.at
        if spec.name not in self._targets.names():
            self._targets.put(spec.name, found_target(spec, held, now) or first_target(spec, held, now))
        elif digest(spec) != self._targets.get(spec.name).rejected:
            # A rolled back revision is tried again only when it is applied again.
            try:
                self._set_target(spec.name, self._adopted(spec, self._deployment))
            except SwitchRefused as refused:
                self._event(str(refused))

    async def _layers_once_known(self) -> Mapping[LayerKey, ActuatorLayer]:
        while True:
            try:
                return await self._actuator.layers()
            except (TidegateError, OSError) as error:
                self._event(str(error))
                await asyncio.sleep(RETRY_S)

    async def tick(self) -> None:
        """Observe, decide, and take one step for each model. A model's failure is part of its status."""
        if self._targets.unsaved:
            self._targets.save()
        self._observed.held = held = await self._actuator.layers()
        hosts = {host: key for key, layer in held.items() for host in layer.hosts}
        self.registry.expect(hosts, self._monotonic())
        self._restore()
        if self._has_listened():
            await self.autoscaler.tick(self._deployment)
            for name in self._targets.names():
                with self._failures.recorded(name, "control step"):
                    if failure := self._layer_failure(self._targets.get(name).spec):
                        raise ActuatorFailed(failure)
                    await self._tick_model(name)
        models = fleet_models(self._targets, self._observed, self._failures, self.autoscaler.at)
        self.registry.set_models(models)
        await self.adapters.place()

    def _has_listened(self) -> bool:
        """Whether running replicas had the time to report: without data nothing is changed."""
        if self._observed.unreported() and self._monotonic() < self._listen_until:
            return False
        self._listen_until = 0.0
        self._all_reported.set()
        return True

    async def _tick_model(self, name: str) -> None:
        target = self._judge(name, self._targets.get(name))
        resolved = self._weights.resolve(target, self._deployment, self.autoscaler.at)
        if resolved != target:
            target = resolved
            self._set_target(name, target)
        layers = self._observed.layers(name)
        deployed = self._deployed(name)
        counts = {key: layer.wanted if deployed else 0 for key, layer in layers.items()}
        # Nothing is scaled down for a revision whose weights are not known to exist.
        if deployed and target.weights_known:
            extra = self._replacement.step(target, lambda: self.autoscaler.has_room(target, self._deployment))
            model = self._observed.model(target, self._deployment.budget)
            closing = self._observed.closes_s(target, self.autoscaler.at) > 0
            rollout = model._replace(closing=closing).rollout(extra)
            counts = rollout.step()
            if target.ends_at is not None and not closing and rollout.keeps_others(counts):
                # Not all of them drain now, as room has come free: those that stay serve on.
                target = replace(target, ends_at=None)
                self._targets.put(name, target)
        for key, count in counts.items():
            await self._actuate(target, key, count)
        await self._sweep(name, layers)

    async def _actuate(self, target: ModelTarget, key: LayerKey, count: int) -> None:
        held, at = self._observed.held.get(key), self._monotonic()
        if held is None and count:
            spec, weights = target.specs[key.generation], target.weights.get(key.generation)
            made_of = digest(spec, key.shape) + (weights.short if weights else "")
            self._event(f"{key.model}: deploy {_describe(key)} with {count}")
            await self._actuator.deploy(key, spec, weights, made_of, count)
            self._observed.ordered(key, count, at, was=0)
        elif held is not None and held.wanted != count:
            self._event(f"{key.model}: {_describe(key)}: {held.wanted} -> {count}")
            await self._actuator.scale(key, count)
            self._observed.ordered(key, count, at, was=held.wanted)

    async def _sweep(self, name: str, layers: Mapping[LayerKey, Layer]) -> None:
        """Delete layers that are no longer used, and forget their configuration.

        The target is read again after each call of the actuator: it may have changed meanwhile.
        """
        for key, layer in layers.items():
            left = not self._deployed(name) or not self._targets.get(name).keeps(key)
            if left and not layer.occupied and key in self._observed.held:
                self._event(f"{name}: delete {_describe(key)}")
                await self._actuator.delete(key)
        if not self._deployed(name) and not layers:
            self._targets.drop(name)
            self._failures.forget(name)
            return
        target = self._targets.get(name)
        if (pruned := target.pruned(layers)) != target:
            self._targets.put(name, pruned)

    def _judge(self, name: str, target: ModelTarget) -> ModelTarget:
        """Settle a target that was reached; roll back one that failed."""
        if target.settled:
            return target
        layer = self._observed.layer(target.key())
        if reached(target.aim.count, layer):
            target = target.reached()
            self._set_target(name, target)
        elif target.fallback is not None:
            at, timeout_s = self.autoscaler.at, self._observed.start_timeout_s(target)
            waits = self._observed.waits_for_drain(target, at)
            if waits != target.waits:
                target = target.waiting(waits, at)
                self._targets.put(name, target)
            if failed := verdict(layer, target.starts_for_s(at), timeout_s):
                reason = self._observed.reason(target.key()) or failed
                target = target.back(f"rolled back from {target.aim}: {reason}", at)
                self._event(f"{name}: {target.note}")
                self._set_target(name, target)
                self.autoscaler.decide_soon(name)
        return target

    def _adopted(self, spec: ModelSpec, deployment: Deployment) -> ModelTarget:
        """The target with ``spec`` as its configuration: live where it can, a new generation where not.

        Raises :class:`SwitchRefused`.
        """
        now = self.autoscaler.at
        if spec.name not in self._targets.names():
            return first_target(spec, self._observed.held, now)
        target = self._targets.get(spec.name)
        adopting = target.adopting(spec, now)
        same = adopting.key() == target.key()
        if same:
            return replace(adopting, gap=target.gap, ends_at=target.ends_at)
        return self._observed.planned(adopting, deployment)

    def _declare(self) -> None:
        """Say where layers may be: a rollout or a removal may have been cut short by a restart."""
        if self._by_engine is not None:
            self._by_engine.declare(self._deployment.models, self._targets.stored_specs)

    def _layer_failure(self, spec: ModelSpec) -> str:
        """Why it is not known what runs of a model; empty if it is."""
        return "" if self._by_engine is None else self._by_engine.failure(spec)

    def _deployed(self, model: str) -> bool:
        return any(spec.name == model for spec in wanted_models(self._deployment))

    def _target(self, model: str) -> ModelTarget:
        """The target of a model; raises :class:`TargetError` for one that is unknown or being removed.

        Raises :class:`Unreachable` while it is not known what runs of it.
        """
        if (spec := self._unrestored.get(model)) is not None:
            raise Unreachable(f"{model}: {self._layer_failure(spec)}; try again")
        target = self._targets.get(model)
        if not self._deployed(model):
            raise TargetError(f"{model} is no longer in the deployment; its replicas drain")
        return target

    def _set_target(self, model: str, target: ModelTarget) -> None:
        aimed = self._targets.get(model).aim if model in self._targets.names() else None
        self._targets.put(model, target)
        if aimed != target.aim:
            # Earlier start failures do not count against a new target.
            self._observed.clear_failures(target.key())
            self._event(f"{model}: target {target.aim}")
        self._wake.set()

    def _spec_of(self, replica: Replica) -> ModelSpec | None:
        """The configuration of the replica's revision."""
        if replica.model not in self._targets.names():
            return None
        return self._targets.get(replica.model).specs.get(replica.generation)

    def _timeouts(self, replica: Replica) -> Timeouts | None:
        """Those of its revision; ``None`` leaves those in force with which its drain for a switch began."""
        if (spec := self._spec_of(replica)) is None:
            return None
        timeouts, target = Timeouts.of(spec.control), self._targets.get(replica.model)
        if target.ends_at is None or LayerKey.of(replica) == target.key():
            return timeouts
        if replica.state is ReplicaPhase.DRAINING:
            return None
        left_s = max(0.0, target.ends_at - self.autoscaler.at)
        return replace(timeouts, drain_timeout_s=min(timeouts.drain_timeout_s, left_s))

    def _adapter_slots(self, replica: Replica) -> int:
        """How many adapters a replica can load at once, by its revision."""
        spec = self._spec_of(replica)
        return spec.adapters.slots_per_replica if spec is not None and spec.adapters is not None else 0

    def _lost(self, replica: Replica) -> None:
        self._event(f"{replica.id}: gone")
        self.autoscaler.decide_soon(replica.model)

    async def _hung(self, replica: Replica) -> None:
        self._event(f"{replica.id}: its host hangs and is replaced")
        with self._failures.recorded(replica.model, "replacing a host that hangs"):
            await self._actuator.kill(LayerKey.of(replica), replica.id)

    def _until(self, for_s: float | None) -> float | None:
        return None if for_s is None else self.autoscaler.at + for_s

    def _model_status(self, name: str) -> ModelStatus:
        notes = (self._failures.note(name), self._replacement.note(name))
        target = self._targets.get(name)
        resolving = self._weights.pending(target)
        return model_status(target, self._observed, self.autoscaler, notes, resolving=resolving)

    def _event(self, text: str) -> None:
        if not self._events or not self._events[-1].endswith(text):
            log.info("%s", text)
            self._events.append(f"{time.strftime('%H:%M:%S', time.localtime(self._wall()))} {text}")


def _describe(key: LayerKey) -> str:
    return f"{key.shape} of generation {key.generation}"
