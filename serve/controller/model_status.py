"""The status of models, for gateways and for operators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from policy.config.deployment import ModelSpec
from policy.scaling.reconcile_steps import Layer, LayerKey
from policy.types import Model
from serve.autoscaler.autoscaler import Autoscaler
from serve.controller_api_schema import ModelStatus
from serve.state.desired_state import ModelTarget, ModelTargets
from serve.state.observed_state import ObservedState
from serve.state.reconcile_errors import ModelFailures


def model_status(
    target: ModelTarget,
    observed: ObservedState,
    autoscaler: Autoscaler,
    notes: Sequence[str] = (),
    *,
    resolving: bool = False,
) -> ModelStatus:
    """The status of one model and its last decision; ``notes`` are of other parts of the controller."""
    name, key, at = target.spec.name, target.key(), autoscaler.at
    layers, held = observed.layers(name), observed.held.get(key)
    retry_at = held.retry_at if held is not None else None
    again = "" if retry_at is None or retry_at <= at else f"tried again in {retry_at - at:.0f} s"
    status = ModelStatus(
        name=name,
        engine=str(target.spec.engine),
        mode=target.aim.mode,
        shape=key.shape,
        generation=key.generation,
        target=target.aim.count,
        ready=layers.get(key, Layer()).ready,
        phase=phase(target, layers),
        note="; ".join(filter(None, (_note(target, observed), again, *notes))),
        resolving=resolving,
        decided_by=autoscaler.decided_by(name),
        override=target.override(at),
        barred={mode: block.until for mode, block in target.barred.items() if block.until > at},
    )
    decision = autoscaler.latest.get(name)
    if decision is None:
        return status
    return replace(
        status,
        decided_at=decision.at,
        reason=decision.reason,
        capability=decision.capability,
        forecast=decision.proposal.forecast,
        dry_run=decision.dry_run,
    )


def unknown_status(spec: ModelSpec, note: str) -> ModelStatus:
    """The status of a model of which it is not known what runs; ``note`` says why."""
    shape = spec.modes[spec.first_mode].shape
    return ModelStatus(
        name=spec.name, engine=str(spec.engine), mode=spec.first_mode, shape=shape, generation=0,
        target=0, ready=0, phase="unknown", note=note,
    )  # fmt: skip


def fleet_models(
    targets: ModelTargets, observed: ObservedState, failures: ModelFailures, at: float
) -> Iterator[Model]:
    """The models of a fleet snapshot at ``at``."""
    for name in targets.names():
        target = targets.get(name)
        spec, aim = target.spec, target.aim
        lengths = (replica.max_model_len for replica in observed.registry.of(target.key()))
        yield Model(
            name=name,
            engine=spec.engine,
            runner=spec.runner,
            max_model_len=next((length for length in lengths if length), None),
            mode=aim.mode,
            shape=aim.shape,
            target=aim.count,
            generation=aim.generation,
            created=int(target.created),
            note="; ".join(filter(None, (_note(target, observed), failures.note(name)))),
            counts=_counts(spec, observed),
            closes_s=None if target.ends_at is None else observed.closes_s(target, at),
        )


def _counts(spec: ModelSpec, observed: ObservedState) -> dict[str, int]:
    """The desired counts by shape, where another autoscaler carries them out."""
    if spec.discovery is None or not spec.discovery.is_autoscaled:
        return {}
    held = {key.shape: layer.wanted for key, layer in observed.held.items() if key.model == spec.name}
    return dict.fromkeys(spec.shapes, 0) | held


def phase(target: ModelTarget, layers: Mapping[LayerKey, Layer]) -> str:
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


def _note(target: ModelTarget, observed: ObservedState) -> str:
    return target.note or observed.reason(target.key())
