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

import httpx
import msgspec

from policy.config import ModelSpec
from policy.errors import SwitchRefused, TargetError, TidegateError
from policy.parsing import parse
from policy.plan import Footprint, Goal, Layer, LayerKey, step
from policy.switching import gap_needed, reached, verdict
from policy.types import Fleet, Model, Replica, ReplicaState
from serve.actuator.port import Actuator, Held
from serve.client import ControllerStatus, ModelStatus
from serve.registry import Registry
from serve.targets import Aim, Target, Targets, engine_digest, first_target, wanted_models
from store.state import SECRET_HEADER, StateDir

log = logging.getLogger("tidegate.controller")

TICK_S = 0.2
EVENTS_KEPT = 100


class Controller:
    """Holds targets and the fleet, and steers the one towards the other."""

    def __init__(self, actuator: Actuator, state: StateDir, pid: int) -> None:
        self._actuator = actuator
        self._state = state
        self._pid = pid
        self._epoch = time.time()
        self._targets = Targets(state)
        self._layers: Mapping[LayerKey, Held] = {}
        self._start_s: dict[LayerKey, float] = {}
        self._failed: dict[LayerKey, Replica] = {}
        self._events: deque[str] = deque(maxlen=EVENTS_KEPT)
        self._wake = asyncio.Event()
        self.registry = Registry(self._epoch)
        self._document = state.load(state.deployment_path, dict[str, object]) or {}
        self._deployment = parse(self._document)

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
        if self.registry.put(replica, time.monotonic()):
            reason = f" ({replica.reason})" if replica.reason else ""
            self._event(f"{replica.id}: {replica.state}{reason}")
            key = LayerKey(replica.model, replica.shape, replica.generation)
            if replica.start_s is not None:
                self._start_s[key] = replica.start_s
            if replica.state is ReplicaState.READY:
                self._failed.pop(key, None)
            elif replica.state is ReplicaState.STARTING and replica.failures:
                # Kept past the replica: a host that failed too often is gone before the next tick.
                self._failed[key] = replica
            self._wake.set()

    def scale(self, model: str, replicas: int) -> ModelStatus:
        """Set the count of the current mode; raises :class:`TargetError` outside its bounds."""
        target = self._targets.get(model)
        bounds = target.spec.modes[target.aim.mode].bounds
        if not bounds.min <= replicas <= bounds.max:
            raise TargetError(
                f"{model}: {replicas} replicas in mode {target.aim.mode}, expected {bounds.min} to {bounds.max}"
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
        bounds = target.spec.modes[mode].bounds
        aim = Aim(mode=mode, count=max(bounds.min, 1), generation=target.aim.generation)
        proposed = target.toward(aim, time.time())
        goal = self._goal(proposed)
        if gap_needed(goal, self._observed(model), self._footprints(model), *self._budget(model)):
            start_s = self._start_s.get(goal.key, target.spec.control.assumed_start_s)
            limit_s = self._deployment.gateway.queue_timeout_s
            if start_s > limit_s:
                raise SwitchRefused(
                    f"{model}: {mode} needs every resource that the running replicas hold; its start takes"
                    f" about {start_s:.0f} s and gateway.queue_timeout_s = {limit_s:g} s cannot hold"
                    " the requests that arrive meanwhile"
                )
            proposed = target.toward(aim, time.time(), gap=True)
        self._steer(model, proposed)
        return self._model_status(model)

    def apply(self, document: dict[str, object]) -> ControllerStatus:
        """Take a new deployment document, whole or not at all."""
        deployment = parse(document)
        now = time.time()
        self._state.save(self._state.deployment_path, document)
        self._deployment, self._document = deployment, document
        for spec in wanted_models(deployment):
            self._adopt(spec, now, retry=True)
        self._event("a new deployment was applied")
        self._wake.set()
        return self.status()

    # The loop.

    async def run(self) -> None:
        """Tick until cancelled."""
        await self._rebuild()
        probing = asyncio.create_task(self._probe_silent())
        try:
            while True:
                try:
                    await self._tick()
                except TidegateError as error:
                    self._event(str(error))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TICK_S):
                        await self._wake.wait()
                self._wake.clear()
        finally:
            probing.cancel()

    async def _rebuild(self) -> None:
        """Take up what a predecessor left: counts and generations from the actuator's layers."""
        self._layers = await self._patient_layers()
        now = time.time()
        for spec in wanted_models(self._deployment):
            if spec.name not in self._targets.names():
                self._targets.put(spec.name, self._found(spec, now) or first_target(spec, now))
            else:
                self._adopt(spec, now, retry=False)

    async def _patient_layers(self) -> Mapping[LayerKey, Held]:
        while True:
            try:
                return await self._actuator.layers()
            except TidegateError as error:
                self._event(str(error))
                await asyncio.sleep(1.0)

    def _found(self, spec: ModelSpec, now: float) -> Target | None:
        """A target that matches what runs, when the targets themselves were lost."""
        running = [
            (held.wanted, key)
            for key, held in self._layers.items()
            if key.model == spec.name and held.digest == engine_digest(spec) and held.wanted
        ]
        if not running:
            return None
        count, key = max(running)
        mode = next((name for name, mode in spec.modes.items() if mode.shape == key.shape), spec.first_mode)
        aim = Aim(mode=mode, count=count, generation=key.generation)
        return Target(aim=aim, since=now, specs={key.generation: spec})

    def _adopt(self, spec: ModelSpec, now: float, *, retry: bool) -> None:
        """Make ``spec`` the model's configuration: live where it can, a new generation where not.

        A configuration that was rolled back is tried again only when it is applied again.
        """
        if spec.name not in self._targets.names():
            self._targets.put(spec.name, first_target(spec, now))
            return
        target = self._targets.get(spec.name)
        if retry or engine_digest(spec) != target.rejected:
            self._steer_to_spec(target, spec, now)

    def _steer_to_spec(self, target: Target, spec: ModelSpec, now: float) -> None:
        aim = target.aim
        if engine_digest(spec) != engine_digest(target.spec):
            generation = max(target.specs) + 1
            aim = msgspec.structs.replace(aim, generation=generation)
        specs = target.specs | {aim.generation: spec}
        mode = aim.mode if aim.mode in spec.modes else spec.first_mode
        bounds = spec.modes[mode].bounds
        count = min(max(aim.count, bounds.min), bounds.max)
        aim = msgspec.structs.replace(aim, mode=mode, count=count)
        if aim == target.aim:
            self._targets.put(spec.name, msgspec.structs.replace(target, specs=specs))
            return
        self._steer(spec.name, msgspec.structs.replace(target, specs=specs).toward(aim, now))

    async def _tick(self) -> None:
        self._layers = await self._actuator.layers()
        for name in self._targets.names():
            await self._steer_layers(name)
        self.registry.set_models(self._models())

    async def _steer_layers(self, name: str) -> None:
        target = self._judge(name, self._targets.get(name))
        observed = self._observed(name)
        goal = self._goal(target)
        wanted = name in {spec.name for spec in wanted_models(self._deployment)}
        counts = (
            step(goal, observed, self._footprints(name), *self._budget(name))
            if wanted
            else dict.fromkeys(observed, 0)
        )
        for key, count in counts.items():
            held = self._layers.get(key)
            if held is None and count:
                spec = target.specs[key.generation]
                self._event(f"{name}: deploy {key.shape} of generation {key.generation} with {count}")
                await self._actuator.deploy(key, spec, engine_digest(spec), count)
            elif held is not None and held.wanted != count:
                self._event(f"{name}: {key.shape} of generation {key.generation}: {held.wanted} -> {count}")
                await self._actuator.scale(key, count)
        await self._sweep(name, target, observed, wanted)

    async def _sweep(
        self, name: str, target: Target, observed: Mapping[LayerKey, Layer], wanted: bool
    ) -> None:
        """End layers that serve nobody and never will, and forget their configuration."""
        current = {target.aim.generation} | ({target.fallback.generation} if target.fallback else set())
        for key, layer in observed.items():
            gone = not layer.occupied and key in self._layers
            if gone and (not wanted or key.generation not in current):
                self._event(f"{name}: delete {key.shape} of generation {key.generation}")
                await self._actuator.delete(key)
        if not wanted and not observed:
            self._targets.drop(name)
            return
        in_use = current | {key.generation for key in observed}
        if set(target.specs) - in_use:
            specs = {generation: spec for generation, spec in target.specs.items() if generation in in_use}
            self._targets.put(name, msgspec.structs.replace(target, specs=specs))

    def _judge(self, name: str, target: Target) -> Target:
        """Settle an aim that was reached; go back from one that failed."""
        if target.settled:
            return target
        layer = self._observed(name).get(target.key(), Layer())
        if reached(target.aim.count, layer):
            target = msgspec.structs.replace(target, settled=True, fallback=None, gap=False)
            self._steer(name, target)
            return target
        control = target.spec.control
        failed = verdict(layer, time.time() - target.since, control.start_timeout_s)
        if failed and target.fallback is not None and self._differs(target):
            reason = self._reason(target.key()) or failed
            note = f"rolled back from {_said(target.aim)}: {reason}"
            self._event(f"{name}: {note}")
            new_generation = target.fallback.generation != target.aim.generation
            target = msgspec.structs.replace(
                target, aim=target.fallback, fallback=None, since=time.time(), gap=True, note=note,
                rejected=engine_digest(target.spec) if new_generation else target.rejected,
            )  # fmt: skip
            self._steer(name, target)
        return target

    def _differs(self, target: Target) -> bool:
        return target.fallback is not None and target.key(target.fallback) != target.key()

    def _reason(self, key: LayerKey) -> str:
        if (failed := self._failed.get(key)) is not None:
            return failed.reason
        held = self._layers.get(key)
        return held.trouble if held else ""

    async def _probe_silent(self) -> None:
        """Ask replicas whose heartbeats stopped at their own port; a refusal ends their membership."""
        headers = {SECRET_HEADER: self._state.secret()}
        async with httpx.AsyncClient(timeout=1.0, headers=headers, trust_env=False) as client:
            while True:
                await asyncio.sleep(TICK_S)
                now = time.monotonic()
                for replica in self.registry.silent(now):
                    refused = False
                    try:
                        await client.get(f"{replica.url or 'http://127.0.0.1:1'}/v1/models")
                    except httpx.ConnectError:
                        refused = bool(replica.url)
                    except httpx.HTTPError:
                        refused = False
                    if self.registry.give_up(replica, time.monotonic(), refused=refused):
                        self._event(f"{replica.id}: gone")
                        self._wake.set()

    # What is observed and said.

    def _observed(self, name: str) -> dict[LayerKey, Layer]:
        keys = {key for key in self._layers if key.model == name} | {
            LayerKey(r.model, r.shape, r.generation) for r in self.fleet().replicas if r.model == name
        }
        return {key: self._layer(key) for key in keys}

    def _layer(self, key: LayerKey) -> Layer:
        held = self._layers.get(key)
        replicas = self.registry.of(key)

        def count(state: ReplicaState) -> int:
            return sum(replica.state is state for replica in replicas)

        return Layer(
            wanted=held.wanted if held else 0,
            starting=count(ReplicaState.STARTING),
            ready=count(ReplicaState.READY),
            draining=count(ReplicaState.DRAINING),
            failures=self._failed[key].failures if key in self._failed else 0,
            broken=bool(held and held.trouble),
        )

    def _footprints(self, name: str) -> dict[LayerKey, Footprint]:
        target = self._targets.get(name)
        footprints = {
            LayerKey(name, shape, generation): Footprint(gpus=made.gpus, cpus=made.cpus)
            for generation, spec in target.specs.items()
            for shape, made in spec.shapes.items()
        }
        return {key: footprints.get(key, Footprint()) for key in {*footprints, *self._observed(name)}}

    def _budget(self, name: str) -> tuple[int | None, int | None]:
        """What is left of the budget for this model: the others' replicas are taken off."""
        left: dict[str, int | None] = {
            "gpus": self._deployment.budget.gpus,
            "cpus": self._deployment.budget.cpus,
        }
        for other in self._targets.names():
            if other == name:
                continue
            footprints = self._footprints(other)
            for key, layer in self._observed(other).items():
                for kind, limit in left.items():
                    if limit is not None:
                        left[kind] = limit - layer.occupied * getattr(footprints[key], kind)
        return left["gpus"], left["cpus"]

    def _goal(self, target: Target) -> Goal:
        healthy = min(target.spec.control.scale.min_healthy, target.aim.count)
        return Goal(key=target.key(), count=target.aim.count, min_healthy=healthy, gap=target.gap)

    def _steer(self, model: str, target: Target) -> None:
        old = self._targets.get(model) if model in self._targets.names() else None
        self._targets.put(model, target)
        if old is None or old.aim != target.aim:
            # A new aim is judged by its own starts.
            self._failed.pop(target.key(), None)
            self._event(f"{model}: target {_said(target.aim)}")
        self._wake.set()

    def _model_status(self, name: str) -> ModelStatus:
        target = self._targets.get(name)
        key = target.key()
        observed = self._observed(name)
        layer = observed.get(key, Layer())
        trouble = target.note or self._reason(key)
        return ModelStatus(
            name=name,
            engine=str(target.spec.engine),
            mode=target.aim.mode,
            shape=key.shape,
            generation=key.generation,
            target=target.aim.count,
            ready=layer.ready,
            phase=_phase(target, layer, any(o.occupied for k, o in observed.items() if k != key)),
            note=trouble,
        )

    def _models(self) -> list[Model]:
        said = []
        for name in self._targets.names():
            target, status = self._targets.get(name), self._model_status(name)
            lengths = [r.max_model_len for r in self.registry.of(target.key()) if r.max_model_len]
            said.append(
                Model(
                    name=name,
                    engine=target.spec.engine,
                    runner=target.spec.runner,
                    mode=status.mode,
                    shape=status.shape,
                    target=status.target,
                    generation=status.generation,
                    max_model_len=lengths[0] if lengths else None,
                    created=int(target.since) if not target.settled else self._created(name),
                    note=status.note,
                )
            )
        return said

    def _created(self, name: str) -> int:
        return int(self._targets.get(name).since)

    def _event(self, text: str) -> None:
        if not self._events or not self._events[-1].endswith(text):
            log.info("%s", text)
            self._events.append(f"{time.strftime('%H:%M:%S')} {text}")


def _said(aim: Aim) -> str:
    return f"{aim.mode} x {aim.count}, generation {aim.generation}"


def _phase(target: Target, layer: Layer, others: bool) -> str:
    if target.settled:
        if others:
            return "draining the old"
        if layer.ready < target.aim.count:
            return "recovering"
        return "idle" if layer.ready > target.aim.count else "steady"
    return "switching" if others else "starting"
