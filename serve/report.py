"""What the controller says of its models, to gateways and to people."""

from __future__ import annotations

from policy.plan import Layer
from policy.types import Model
from serve.client import ModelStatus
from serve.observation import Observation
from serve.registry import Registry
from serve.targets import Targets


def model_status(name: str, targets: Targets, observation: Observation) -> ModelStatus:
    """One model: what is wanted, what is there, and what it is doing."""
    target = targets.get(name)
    key = target.key()
    layers = observation.layers(name)
    layer = layers.get(key, Layer())
    others = any(layer.occupied for other, layer in layers.items() if other != key)
    return ModelStatus(
        name=name,
        engine=str(target.spec.engine),
        mode=target.aim.mode,
        shape=key.shape,
        generation=key.generation,
        target=target.aim.count,
        ready=layer.ready,
        phase=_phase(target.settled, target.aim.count, layer, others),
        note=target.note or observation.reason(key),
    )


def models(targets: Targets, observation: Observation, registry: Registry) -> tuple[Model, ...]:
    """The models of a fleet snapshot."""
    said = []
    for name in targets.names():
        target, status = targets.get(name), model_status(name, targets, observation)
        lengths = (replica.max_model_len for replica in registry.of(target.key()))
        said.append(
            Model(
                name=name,
                engine=target.spec.engine,
                runner=target.spec.runner,
                mode=status.mode,
                shape=status.shape,
                target=status.target,
                generation=status.generation,
                max_model_len=next((length for length in lengths if length), None),
                created=int(target.created),
                note=status.note,
            )
        )
    return tuple(said)


def _phase(settled: bool, count: int, layer: Layer, others: bool) -> str:
    if not settled:
        return "switching" if others else "starting"
    if others:
        return "draining the old"
    if layer.ready < count:
        return "recovering"
    return "idle" if count == 0 else "steady"
