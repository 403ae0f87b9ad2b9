"""The status of models, for gateways and for operators."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from policy.scaling.rollout import Layer, LayerKey
from policy.types import Model
from serve.autoscaler.autoscaler import Autoscaler
from serve.controller_messages import ModelStatus
from serve.state.desired_state import Target, Targets
from serve.state.observed_state import ObservedState
from serve.state.replica_registry import ReplicaRegistry


def model_status(
    name: str, targets: Targets, observation: ObservedState, autoscaler: Autoscaler | None = None
) -> ModelStatus:
    """The status of one model; without ``autoscaler``, without its decision."""
    target = targets.get(name)
    key = target.key()
    layers = observation.layers(name)
    decision = autoscaler.latest.get(name) if autoscaler is not None else None
    status = ModelStatus(
        name=name,
        engine=str(target.spec.engine),
        mode=target.aim.mode,
        shape=key.shape,
        generation=key.generation,
        target=target.aim.count,
        ready=layers.get(key, Layer()).ready,
        phase=phase(target, layers),
        note=target.note or observation.reason(key),
    )
    if autoscaler is None:
        return status
    held = observation.held.get(key)
    if held is not None and held.retry_at is not None and held.retry_at > autoscaler.at:
        again = f"tried again in {held.retry_at - autoscaler.at:.0f} s"
        status = msgspec.structs.replace(status, note=f"{status.note}; {again}" if status.note else again)
    at = autoscaler.at
    barred = {mode: each.until for mode, each in target.barred.items() if each.until > at}
    status = msgspec.structs.replace(
        status, decided_by=autoscaler.decided_by(name), override=target.override(at), barred=barred
    )
    if decision is None:
        return status
    return msgspec.structs.replace(
        status,
        decided_at=decision.at,
        reason=decision.reason,
        capability=decision.capability,
        forecast=decision.proposal.forecast,
        dry_run=decision.dry_run,
    )


def models(targets: Targets, observation: ObservedState, registry: ReplicaRegistry) -> tuple[Model, ...]:
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


def phase(target: Target, layers: Mapping[LayerKey, Layer]) -> str:
    """The phase of a rollout; a restarted controller continues in any of them.

    ``starting`` without old replicas, ``switching`` while new ones start beside the old, ``giving way`` while
    old ones free resources for them, ``rolling back`` after a failure, ``draining the old``; then ``steady``
    or ``idle``, or ``recovering`` after a replica was lost.
    """
    layer = layers.get(target.key(), Layer())
    others = [layer for key, layer in layers.items() if key != target.key() and layer.occupied]
    if not target.settled:
        if target.note and others:
            return "rolling back"
        if any(other.occupied > other.wanted for other in others):
            return "giving way"
        return "switching" if others else "starting"
    if others:
        return "draining the old"
    if layer.ready < target.aim.count:
        return "recovering"
    return "idle" if target.aim.count == 0 else "steady"
