"""The controller: sources -> observed layers -> policy step -> actuator, once a tick.

The composition root of the control plane; read this first. It keeps nothing that it could not
rebuild: targets come from the state directory, layers from the actuator, replicas from heartbeats.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Mapping

import msgspec

from policy.config import ModelSpec
from policy.errors import SwitchRefused, TargetError, TidegateError
from policy.parsing import parse
from policy.plan import Goal, Layer, LayerKey, step
from policy.switching import gap_needed, reached, verdict
from policy.types import Fleet, Replica
from serve.actuator.port import Actuator, Held
from serve.client import ControllerStatus, ModelStatus
from serve.observation import Observation
from serve.probe import probe_silent
from serve.registry import Registry
from serve.report import model_status, models
from serve.targets import Aim, Target, Targets, engine_digest, first_target, found_target, wanted_models
from store.state import StateDir

log = logging.getLogger("tidegate.controller")

TICK_S = 0.2
RETRY_S = 1.0
EVENTS_KEPT = 100


class Controller:
    """Holds targets and the fleet, and steers the one towards the other."""

    def __init__(self, actuator: Actuator, state: StateDir, pid: int) -> None:
        self._actuator = actuator
        self._state = state
        self._pid = pid
        self._epoch = time.time()
        self._targets = Targets(state)
        self.registry = Registry(self._epoch)
        self._observation = Observation(self.registry, self._targets)
        self._events: deque[str] = deque(maxlen=EVENTS_KEPT)
        self._wake = asyncio.Event()
        self._deployment = parse(state.load(state.deployment_path, dict[str, object]))

    # What the HTTP API calls.

    def fleet(self) -> Fleet:
        """The snapshot of this instant."""
        return self.registry.fleet(time.time())

    def status(self) -> ControllerStatus:
        """What each model is doing."""
        return ControllerStatus(
            actuator=self._actuator.name,
            epoch=self._epoch,
            pid=self._pid,
            models=tuple(self._model_status(name) for name in self._targets.names()),
            events=tuple(self._events),
        )

    def beat(self, replica: Replica) -> None:
        """Take a heartbeat of a replica host."""
        self._observation.note(replica)
        if self.registry.put(replica, time.monotonic()):
            self._event(f"{replica.id}: {replica.state}" + (f" ({replica.reason})" if replica.reason else ""))
            self._wake.set()

    def scale(self, model: str, replicas: int) -> ModelStatus:
        """Set the count of the current mode; raises :class:`TargetError` outside its bounds."""
        target = self._targets.get(model)
        bounds = target.spec.modes[target.aim.mode].bounds
        if not bounds.min <= replicas <= bounds.max:
            expected = f"{bounds.min} to {bounds.max}" if bounds.min < bounds.max else str(bounds.max)
            raise TargetError(
                f"{model}: {replicas} replicas in mode {target.aim.mode}, expected {expected}"
                f" (models.{model}.modes.{target.aim.mode}.replicas)"
            )
        aim = msgspec.structs.replace(target.aim, count=replicas)
        self._steer(model, target.toward(aim, time.time(), gap=target.gap))
        return self._model_status(model)

    def mode(self, model: str, mode: str) -> ModelStatus:
        """Switch to ``mode`` at its lowest count; raises :class:`SwitchRefused` when it would starve."""
        target = self._targets.get(model)
        if mode not in target.spec.modes:
            raise TargetError(f"{model}: mode {mode!r}, expected one of {', '.join(target.spec.modes)}")
        if mode == target.aim.mode:
            return self._model_status(model)
        count = max(target.spec.modes[mode].bounds.min, 1)
        aim = Aim(mode=mode, count=count, generation=target.aim.generation)
        now = time.time()
        proposed = target.toward(aim, now)
        self._steer(model, target.toward(aim, now, gap=True) if self._starves(proposed) else proposed)
        return self._model_status(model)

    def apply(self, document: dict[str, object]) -> ControllerStatus:
        """Take a new deployment document, whole or not at all."""
        deployment = parse(document)
        self._state.save(self._state.deployment_path, document)
        self._deployment = deployment
        for spec in wanted_models(deployment):
            self._adopt(spec, time.time(), retry=True)
        self._event("a new deployment was applied")
        self._wake.set()
        return self.status()

    # The loop.

    async def run(self) -> None:
        """Tick until cancelled."""
        await self._rebuild()
        probing = asyncio.create_task(probe_silent(self.registry, self._state.secret(), self._lost))
        try:
            while True:
                try:
                    await self._tick()
                except TidegateError as error:
                    self._event(str(error))
                    await asyncio.sleep(RETRY_S)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TICK_S):
                        await self._wake.wait()
                self._wake.clear()
        finally:
            probing.cancel()

    async def _rebuild(self) -> None:
        """Take up what a predecessor left: counts and generations from the actuator's layers."""
        self._observation.held = await self._patient_layers()
        now = time.time()
        for spec in wanted_models(self._deployment):
            if spec.name not in self._targets.names():
                target = found_target(spec, self._observation.held, now) or first_target(spec, now)
                self._targets.put(spec.name, target)
            else:
                self._adopt(spec, now, retry=False)

    async def _patient_layers(self) -> Mapping[LayerKey, Held]:
        while True:
            try:
                return await self._actuator.layers()
            except TidegateError as error:
                self._event(str(error))
                await asyncio.sleep(RETRY_S)

    async def _tick(self) -> None:
        self._observation.held = await self._actuator.layers()
        for name in self._targets.names():
            await self._tick_model(name)
        self.registry.set_models(models(self._targets, self._observation, self.registry))

    async def _tick_model(self, name: str) -> None:
        target = self._judge(name, self._targets.get(name))
        layers = self._observation.layers(name)
        wanted = any(spec.name == name for spec in wanted_models(self._deployment))
        counts = dict.fromkeys(layers, 0)
        if wanted:
            footprints = self._observation.footprints(name)
            room = self._observation.room(name, self._deployment.budget)
            counts = step(_goal(target), layers, footprints, *room)
        for key, count in counts.items():
            await self._actuate(target, key, count)
        await self._sweep(name, target, layers, wanted)

    async def _actuate(self, target: Target, key: LayerKey, count: int) -> None:
        held = self._observation.held.get(key)
        if held is None and count:
            spec = target.specs[key.generation]
            self._event(f"{key.model}: deploy {_said_layer(key)} with {count}")
            await self._actuator.deploy(key, spec, engine_digest(spec), count)
        elif held is not None and held.wanted != count:
            self._event(f"{key.model}: {_said_layer(key)}: {held.wanted} -> {count}")
            await self._actuator.scale(key, count)

    async def _sweep(self, name: str, target: Target, layers: Mapping[LayerKey, Layer], wanted: bool) -> None:
        """End layers that serve nobody and never will, and forget their configuration."""
        current = {aim.generation for aim in (target.aim, target.fallback) if aim is not None}
        for key, layer in layers.items():
            idle = not layer.occupied and key in self._observation.held
            if idle and (not wanted or key.generation not in current):
                self._event(f"{name}: delete {_said_layer(key)}")
                await self._actuator.delete(key)
        if not wanted and not layers:
            self._targets.drop(name)
            return
        in_use = current | {key.generation for key in layers}
        if set(target.specs) - in_use:
            specs = {generation: spec for generation, spec in target.specs.items() if generation in in_use}
            self._targets.put(name, msgspec.structs.replace(target, specs=specs))

    def _judge(self, name: str, target: Target) -> Target:
        """Settle an aim that was reached; go back from one that failed."""
        if target.settled:
            return target
        layer = self._observation.layer(target.key())
        if reached(target.aim.count, layer):
            target = msgspec.structs.replace(target, settled=True, fallback=None, gap=False)
            self._steer(name, target)
        elif target.fallback is not None:
            elapsed_s = time.time() - target.since
            failed = verdict(layer, elapsed_s, target.spec.control.start_timeout_s)
            if failed:
                reason = self._observation.reason(target.key()) or failed
                target = target.back(f"rolled back from {_said(target.aim)}: {reason}", time.time())
                self._event(f"{name}: {target.note}")
                self._steer(name, target)
        return target

    def _starves(self, proposed: Target) -> bool:
        """Whether the switch leaves a moment without replicas, which the queue is able to hold.

        Raises :class:`SwitchRefused` when the queue is not.
        """
        name, goal = proposed.spec.name, _goal(proposed)
        layers, footprints = self._observation.layers(name), self._observation.footprints(name)
        if not gap_needed(goal, layers, footprints, *self._observation.room(name, self._deployment.budget)):
            return False
        start_s = self._observation.start_s(goal.key, proposed.spec.control.assumed_start_s)
        limit_s = self._deployment.gateway.queue_timeout_s
        if start_s > limit_s:
            raise SwitchRefused(
                f"{name}: {proposed.aim.mode} needs resources that the running replicas hold, and its start"
                f" takes about {start_s:.0f} s: gateway.queue_timeout_s = {limit_s:g} s cannot hold the"
                " requests that arrive meanwhile"
            )
        return True

    def _adopt(self, spec: ModelSpec, now: float, *, retry: bool) -> None:
        """Make ``spec`` the model's configuration: live where it can, a new generation where not.

        A configuration that was rolled back is tried again only when it is applied again.
        """
        if spec.name not in self._targets.names():
            self._targets.put(spec.name, first_target(spec, now))
            return
        target = self._targets.get(spec.name)
        if retry or engine_digest(spec) != target.rejected:
            adopted = target.adopting(spec, now)
            if adopted.aim == target.aim:
                self._targets.put(spec.name, adopted)
            else:
                self._steer(spec.name, adopted)

    def _steer(self, model: str, target: Target) -> None:
        aimed = self._targets.get(model).aim
        self._targets.put(model, target)
        if aimed != target.aim:
            # A new aim is judged by its own starts.
            self._observation.forgive(target.key())
            self._event(f"{model}: target {_said(target.aim)}")
        self._wake.set()

    def _lost(self, replica: Replica) -> None:
        self._event(f"{replica.id}: gone")
        self._wake.set()

    def _model_status(self, name: str) -> ModelStatus:
        return model_status(name, self._targets, self._observation)

    def _event(self, text: str) -> None:
        if not self._events or not self._events[-1].endswith(text):
            log.info("%s", text)
            self._events.append(f"{time.strftime('%H:%M:%S')} {text}")


def _goal(target: Target) -> Goal:
    healthy = min(target.spec.control.scale.min_healthy, target.aim.count)
    return Goal(key=target.key(), count=target.aim.count, min_healthy=healthy, gap=target.gap)


def _said(aim: Aim) -> str:
    return f"{aim.mode} x {aim.count}, generation {aim.generation}"


def _said_layer(key: LayerKey) -> str:
    return f"{key.shape} of generation {key.generation}"
