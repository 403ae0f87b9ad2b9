"""The controller: sources -> observed layers -> policy step -> actuator, once a tick.

The composition root of the control plane; read this first. It keeps nothing that it could not
rebuild: targets come from the state directory, layers from the actuator, replicas from heartbeats.
This module is over 400 lines: it composes the parts of the control plane.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping

import msgspec

from policy.config.deployment import Deployment, ModelSpec
from policy.config.generation import digest
from policy.document.parse import parse
from policy.errors import SwitchRefused, TargetError, TidegateError
from policy.scaling.rollout import Layer, LayerKey, reached, step, verdict
from policy.scaling.situation import Override
from policy.signals.aggregator import SignalAggregator
from policy.types import Fleet, Replica
from policy.wire.heartbeat import Heartbeat, Orders
from policy.wire.reports import GatewayReport
from serve.actuator.gpu_sharing import SharedGpuActuator
from serve.actuator.port import Actuator, Held
from serve.adapters.controller import AdapterController
from serve.adapters.store_port import AdapterStore
from serve.autoscaler.autoscaler import Autoscaler
from serve.autoscaler.replacement import ReplicaReplacement
from serve.autoscaler.step_feed import StepLine, StepSubscribers
from serve.controller.liveness import probe_silent
from serve.controller.status import model_status, models
from serve.controller_api import ControllerStatus, ModelStatus
from serve.host.weights import Resolver
from serve.state.generation_weights import GenerationWeights
from serve.state.observed import ObservedState
from serve.state.replica_registry import ReplicaRegistry
from serve.state.targets import Target, Targets, first_target, found_target, wanted_models
from store.state_dir import StateDir

log = logging.getLogger("tidegate.controller")

TICK_S = 0.2
# Four beats of a replica host: until then a controller that was restarted has heard of nobody.
HEARING_S = 2.0
RETRY_S = 1.0
EVENTS_KEPT = 100


class Controller:
    """Holds targets and the fleet, and steers the one towards the other."""

    def __init__(
        self,
        actuator: Actuator,
        state: StateDir,
        pid: int,
        shelf: Callable[[], AdapterStore],
        *,
        wall: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self._actuator = SharedGpuActuator(actuator, state)
        self._state = state
        self._pid = pid
        self._wall = wall
        self._monotonic = monotonic
        self._epoch = wall()
        self._hear_until = monotonic() + HEARING_S
        self._heard_all = asyncio.Event()
        self._targets = Targets(state)
        self._keeps = True
        self.registry = ReplicaRegistry(self._epoch)
        self.gathering = SignalAggregator()
        self.listeners = StepSubscribers()
        self._observation = ObservedState(self.registry, self._targets)
        self._events: deque[str] = deque(maxlen=EVENTS_KEPT)
        self._repairing = ReplicaReplacement(self.registry, self._observation, monotonic, self._event)
        self._wake = asyncio.Event()
        self._weighing = GenerationWeights(
            self._observation, Resolver(monotonic, self._wake.set), self._event
        )
        self._deployment = parse(state.load(state.deployment_path, dict[str, object]))
        self.autoscaler = Autoscaler(
            state, self._targets, self._observation, self.gathering,
            now=monotonic, epoch=self._epoch - monotonic(),
            steer=self._steer, wake=self._wake.set, event=self._event,
        )  # fmt: skip
        self.adapters = AdapterController(
            shelf, self.registry, state, self._epoch,
            slots=self._adapter_slots, wall=wall, monotonic=monotonic, event=self._event,
        )  # fmt: skip
        self.adapters.declare(self._deployment, applied=False)

    # What the HTTP API calls.

    def fleet(self) -> Fleet:
        """The snapshot of this instant."""
        return self.registry.fleet(self._wall())

    async def heard(self) -> None:
        """Return once the replicas that run had the time to beat.

        Before that a snapshot of a controller that was restarted would take them from the gateways.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEARING_S):
                await self._heard_all.wait()

    def status(self) -> ControllerStatus:
        """What each model is doing."""
        return ControllerStatus(
            actuator=self._actuator.name,
            epoch=self._epoch,
            pid=self._pid,
            models=tuple(self._model_status(name) for name in self._targets.names()),
            events=tuple(self._events),
        )

    def beat(self, beat: Heartbeat) -> Orders:
        """Take a heartbeat of a replica host; returns what it should do."""
        replica = beat.replica
        self._observation.note(replica, self._monotonic())
        self.gathering.take_beat(beat, self._monotonic())
        self.autoscaler.beat(beat)
        self._repairing.beat(beat)
        self.listeners.tell(beat)
        if self.registry.put(replica, self._monotonic()):
            self._event(f"{replica.id}: {replica.state}" + (f" ({replica.reason})" if replica.reason else ""))
            self._wake.set()
            if self._observation.lacks(LayerKey(replica.model, replica.shape, replica.generation)):
                self.autoscaler.stir(replica.model)
        orders, leave = self.adapters.beat(beat), self._repairing.leave(replica)
        return msgspec.structs.replace(orders, awake=self._actuator.awake(replica), leave=leave)

    def signals(self, report: GatewayReport) -> None:
        """Take what a gateway worker counted."""
        self.gathering.take(report, self._monotonic())
        self.autoscaler.heard(report)

    def steps(self, model: str) -> AsyncIterator[StepLine]:
        """What the engines of ``model`` tell of their steps from now on; raises :class:`TargetError`."""
        return self.listeners.listen(self._target(model).spec.name)

    def scale(self, model: str, replicas: int | None, for_s: float | None = None) -> ModelStatus:
        """Set the count of the current mode by hand, or (``None``) let its policy decide again.

        For ``for_s`` seconds, or until it is taken back. Raises :class:`TargetError` outside its bounds.
        """
        target = self._target(model)
        if replicas is None:
            self._steer(model, msgspec.structs.replace(target, set_count=None))
        else:
            bounds = target.bounds
            if not bounds.min <= replicas <= bounds.max:
                expected = f"{bounds.min} to {bounds.max}" if bounds.min < bounds.max else str(bounds.max)
                raise TargetError(
                    f"{model}: {replicas} replicas in mode {target.aim.mode}, expected {expected}"
                    f" (models.{model}.modes.{target.aim.mode}.replicas)"
                )
            aim = msgspec.structs.replace(target.aim, count=replicas)
            chosen = Override(mode=aim.mode, count=replicas, until=self._until(for_s))
            toward = target.toward(aim, self.autoscaler.at, gap=target.gap) if aim != target.aim else target
            self._steer(model, msgspec.structs.replace(toward, set_count=chosen))
        self.autoscaler.stir(model, urgent=True)
        return self._model_status(model)

    def mode(self, model: str, mode: str | None, for_s: float | None = None) -> ModelStatus:
        """Switch to ``mode`` at its lowest count by hand, or (``None``) let load decide again.

        For ``for_s`` seconds, or until it is taken back. Raises :class:`SwitchRefused` when it would starve,
        or does not fit the budget.
        """
        target = self._target(model)
        if mode is None:
            self._steer(model, msgspec.structs.replace(target, set_mode=None))
        elif mode not in target.spec.modes:
            raise TargetError(f"{model}: mode {mode!r}, expected one of {', '.join(target.spec.modes)}")
        else:
            chosen = Override(mode=mode, until=self._until(for_s))
            if mode != target.aim.mode:
                target = target.toward(target.in_mode(mode), self.autoscaler.at)
                self.autoscaler.check_afford(target, self._deployment)
                gap = self._observation.check_gap(target, self._deployment)
                # A count is one of a mode: what was set for the other says nothing of this one.
                target = msgspec.structs.replace(target, gap=gap, set_count=None)
            self._steer(model, msgspec.structs.replace(target, set_mode=chosen))
        self.autoscaler.stir(model, urgent=True)
        return self._model_status(model)

    def prepare(self, document: dict[str, object]) -> None:
        """Do what of :meth:`apply` may take long and changes nothing; not for an event loop.

        Raises :class:`ConfigError`.
        """
        self.autoscaler.prepare(parse(document))

    def apply(self, document: dict[str, object]) -> ControllerStatus:
        """Take a new deployment document, whole or not at all.

        Raises :class:`ConfigError` for a document that is none, and :class:`SwitchRefused` for a new
        generation that would starve the queue.
        """
        deployment = parse(document)
        self.autoscaler.ready(deployment)
        steered = {spec.name: self._adopted(spec, deployment) for spec in wanted_models(deployment)}
        self._state.save(self._state.deployment_path, document)
        self.autoscaler.adopt(deployment)
        self._deployment = deployment
        for name, target in steered.items():
            # What failed is tried again: somebody may have seen to it. What goes on goes on with its note.
            note = "" if target.settled else target.note
            self._steer(name, msgspec.structs.replace(target, barred={}, note=note))
            self._weighing.look_again(name)
        self.adapters.declare(deployment, applied=True)
        self._event("a new deployment was applied")
        return self.status()

    # The loop.

    async def run(self) -> None:
        """Tick until cancelled."""
        await self.rebuild()
        probing = asyncio.create_task(
            probe_silent(self.registry, self._state.secret(), self._lost, self._monotonic)
        )
        adapting = asyncio.create_task(self.adapters.run())
        try:
            while True:
                try:
                    await self.tick()
                except (TidegateError, OSError) as error:
                    # Of a full disk the second: what runs is kept up as well as it can be.
                    self._event(str(error))
                    await asyncio.sleep(RETRY_S)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TICK_S):
                        await self._wake.wait()
                self._wake.clear()
        finally:
            probing.cancel()
            adapting.cancel()

    async def rebuild(self) -> None:
        """Take up what a predecessor left: counts and generations from the actuator's layers."""
        self._observation.held = await self._patient_layers()
        await self.autoscaler.take_up(self._deployment)
        now = self.autoscaler.at
        held = self._observation.held
        for name in self._targets.names():
            running = {key.generation for key in held if key.model == name}
            self._targets.put(name, self._targets.get(name).resting(running))
        for spec in wanted_models(self._deployment):
            if spec.name not in self._targets.names():
                target = found_target(spec, held, now) or first_target(spec, held, now)
                self._targets.put(spec.name, target)
            elif digest(spec) != self._targets.get(spec.name).rejected:
                # What was rolled back is tried again only when it is applied again.
                try:
                    self._steer(spec.name, self._adopted(spec, self._deployment))
                except SwitchRefused as refused:
                    self._event(str(refused))

    async def _patient_layers(self) -> Mapping[LayerKey, Held]:
        while True:
            try:
                return await self._actuator.layers()
            except TidegateError as error:
                self._event(str(error))
                await asyncio.sleep(RETRY_S)

    async def tick(self) -> None:
        """Observe, and take one step for each model.

        Raises the first :class:`TidegateError` or ``OSError``, after the other models had their step.
        """
        self._keep_targets()
        self._observation.held = await self._actuator.layers()
        errors: list[Exception] = []
        if self._heard():
            await self.autoscaler.tick(self._deployment)
            for name in self._targets.names():
                try:
                    await self._tick_model(name)
                except (TidegateError, OSError) as error:
                    errors.append(error)
        self.registry.set_models(models(self._targets, self._observation, self.registry))
        self.adapters.place()
        if errors:
            raise errors[0]

    def _heard(self) -> bool:
        """Whether replicas that run had the time to say so: no data means no action."""
        if self._observation.unheard() and self._monotonic() < self._hear_until:
            return False
        self._hear_until = 0.0
        self._heard_all.set()
        return True

    async def _tick_model(self, name: str) -> None:
        target = self._weighed(name, self._judge(name, self._targets.get(name)))
        layers = self._observation.layers(name)
        wanted = self._wanted(name)
        counts = {key: layer.wanted if wanted else 0 for key, layer in layers.items()}
        # Nothing gives way to a generation of which it is not known whether it can be had.
        if wanted and target.weighed:
            extra = self._repairing.look(target, lambda: self.autoscaler.has_room(target, self._deployment))
            model = self._observation.model(target, self._deployment.budget)
            counts = step(model.goal(extra), model.layers, model.footprints, *model.room())
        for key, count in counts.items():
            await self._actuate(target, key, count)
        await self._sweep(name, layers)

    async def _actuate(self, target: Target, key: LayerKey, count: int) -> None:
        held = self._observation.held.get(key)
        if held is None and count:
            spec, weights = target.specs[key.generation], target.weights.get(key.generation)
            made_of = digest(spec, key.shape) + (weights.short if weights else "")
            self._event(f"{key.model}: deploy {_said_layer(key)} with {count}")
            self._observation.starts.asked(key, count, self._monotonic())
            await self._actuator.deploy(key, spec, weights, made_of, count)
        elif held is not None and held.wanted != count:
            self._event(f"{key.model}: {_said_layer(key)}: {held.wanted} -> {count}")
            self._observation.starts.asked(key, count - held.wanted, self._monotonic())
            await self._actuator.scale(key, count)

    async def _sweep(self, name: str, layers: Mapping[LayerKey, Layer]) -> None:
        """End layers that serve nobody and never will, and forget their configuration.

        The target is asked for again after each call of the actuator: it may have been set meanwhile.
        """
        for key, layer in layers.items():
            left = not self._wanted(name) or not self._targets.get(name).keeps(key)
            if left and not layer.occupied and key in self._observation.held:
                self._event(f"{name}: delete {_said_layer(key)}")
                await self._actuator.delete(key)
        if not self._wanted(name) and not layers:
            self._targets.drop(name)
            return
        target = self._targets.get(name)
        if (pruned := target.pruned(layers)) != target:
            self._targets.put(name, pruned)

    def _judge(self, name: str, target: Target) -> Target:
        """Settle an aim that was reached; go back from one that failed."""
        if target.settled:
            return target
        layer = self._observation.layer(target.key())
        if reached(target.aim.count, layer):
            target = target.reached()
            self._steer(name, target)
        elif target.fallback is not None:
            timeout_s = target.spec.control.start_timeout_s
            if failed := verdict(layer, self.autoscaler.at - target.since, timeout_s):
                reason = self._observation.reason(target.key()) or failed
                target = target.back(f"rolled back from {target.aim}: {reason}", self.autoscaler.at)
                self._event(f"{name}: {target.note}")
                self._steer(name, target)
                self.autoscaler.stir(name)
        return target

    def _weighed(self, name: str, target: Target) -> Target:
        """Find out of which weights the aim's generation is made."""
        taken = self._weighing.look(target, self._deployment, self.autoscaler.at)
        if taken != target:
            self._steer(name, taken)
        return taken

    def _adopted(self, spec: ModelSpec, deployment: Deployment) -> Target:
        """The target with ``spec`` as its configuration: live where it can, a new generation where not.

        Raises :class:`SwitchRefused`.
        """
        now = self.autoscaler.at
        if spec.name not in self._targets.names():
            return first_target(spec, self._observation.held, now)
        target = self._targets.get(spec.name)
        adopting = target.adopting(spec, now)
        same = adopting.key() == target.key()
        gap = target.gap if same else self._observation.check_gap(adopting, deployment)
        return msgspec.structs.replace(adopting, gap=gap)

    def _wanted(self, model: str) -> bool:
        return any(spec.name == model for spec in wanted_models(self._deployment))

    def _target(self, model: str) -> Target:
        """What may be steered; raises :class:`TargetError` for a model that is none or that leaves."""
        target = self._targets.get(model)
        if not self._wanted(model):
            raise TargetError(f"{model} is no longer in the deployment; its replicas are leaving")
        return target

    def _steer(self, model: str, target: Target) -> None:
        aimed = self._targets.get(model).aim if model in self._targets.names() else None
        self._targets.put(model, target)
        if aimed != target.aim:
            # A new aim is judged by its own starts.
            self._observation.forgive(target.key())
            self._event(f"{model}: target {target.aim}")
        self._wake.set()

    def _keep_targets(self) -> None:
        """Save what a full disk did not take; that it did not is said once."""
        if not self._targets.unsaved:
            self._keeps = True
            return
        if self._keeps:
            self._event(f"targets hold, and cannot be kept for a restart: {self._targets.unsaved}")
        self._targets.save()
        self._keeps = False

    def _adapter_slots(self, replica: Replica) -> int:
        """How many adapters a replica can have loaded at once, as its generation was built."""
        if replica.model not in self._targets.names():
            return 0
        spec = self._targets.get(replica.model).specs.get(replica.generation)
        return spec.adapters.slots_per_replica if spec is not None and spec.adapters is not None else 0

    def _lost(self, replica: Replica) -> None:
        self._event(f"{replica.id}: gone")
        self.autoscaler.stir(replica.model)

    def _until(self, for_s: float | None) -> float | None:
        return None if for_s is None else self.autoscaler.at + for_s

    def _model_status(self, name: str) -> ModelStatus:
        status = model_status(name, self._targets, self._observation, self.autoscaler)
        said = "; ".join(note for note in (status.note, self._repairing.note(name)) if note)
        return msgspec.structs.replace(status, note=said)

    def _event(self, text: str) -> None:
        if not self._events or not self._events[-1].endswith(text):
            log.info("%s", text)
            self._events.append(f"{time.strftime('%H:%M:%S', time.localtime(self._wall()))} {text}")


def _said_layer(key: LayerKey) -> str:
    return f"{key.shape} of generation {key.generation}"
