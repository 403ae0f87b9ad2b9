"""The differences between two deployments, and the effect of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from policy.config.deployment import AdapterSource, Deployment, ModelSpec, Tenant, Upstream
from policy.config.model_revision import changed_shapes, engine_inputs, used_shapes
from policy.config.shared_gpus import gpu_group_of
from policy.engine.performance_model_file import describe

_T = TypeVar("_T")
_Named = Tenant | Upstream | AdapterSource


class Effect(StrEnum):
    """The effect of a change: none, a new generation beside the old one, or a restart."""

    LIVE = "live"
    NEW_GENERATION = "new_generation"
    RESTART = "restart"


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One value that differs; ``None`` if absent. Paths name entries: ``models[NAME].key``."""

    path: str
    before: Any
    after: Any
    effect: Effect
    why: str = ""


# Fixed when the processes start.
_SOCKETS = frozenset({"host", "port", "admin_host", "admin_port", "workers"})


def diff(old: Deployment, new: Deployment) -> tuple[Change, ...]:
    """Every value that differs, in the order of the file."""
    return tuple(_changes(old, new))


def _changes(old: Deployment, new: Deployment) -> Iterator[Change]:
    yield from _models(old, new)
    for section in ("budget", "cluster", "gateway"):
        before, after = _plain(getattr(old, section)), _plain(getattr(new, section))
        for path, one, other in _leaves(section, before, after):
            effect, why = _section_effect(path)
            yield Change(path=path, before=one, after=other, effect=effect, why=why)
    if old.store != new.store:
        why = "the database is opened at the start"
        yield Change(path="store", before=old.store, after=new.store, effect=Effect.RESTART, why=why)
    yield from _named("tenants", old.tenants, new.tenants)
    yield from _named("upstreams", old.upstreams, new.upstreams)


def _models(old: Deployment, new: Deployment) -> Iterator[Change]:
    before = {spec.name: spec for spec in old.models}
    after = {spec.name: spec for spec in new.models}
    # Without a deployed model no controller runs, so the first and the last one need a restart.
    cluster = old.needs_controller != new.needs_controller
    for name, one, other in _pairs(before, after):
        if one is None or other is None:
            yield _whole_model(name, one, other, cluster)
            continue
        rebuilt = _rebuilt(one, other)
        for path, was, becomes in _leaves(f"models[{name}]", _engine(one), _engine(other)):
            if cluster and path.endswith("].engine"):
                yield _restarted(path, was, becomes)
            else:
                effect = Effect.NEW_GENERATION if f"{path}.".startswith(rebuilt) else Effect.LIVE
                yield Change(path=path, before=was, after=becomes, effect=effect)
        yield from _named(f"models[{name}].adapters.sources", _sources(one), _sources(other))


def _named(section: str, old: Sequence[_Named], new: Sequence[_Named]) -> Iterator[Change]:
    """Differences of a list of named entries, whose order does not matter; all are live."""
    before = {entry.name: _plain(entry) for entry in old}
    after = {entry.name: _plain(entry) for entry in new}
    for name, one, other in _pairs(before, after):
        path = f"{section}[{name}]"
        if one is None or other is None:
            yield Change(path=path, before=one, after=other, effect=Effect.LIVE)
            continue
        for leaf, was, becomes in _leaves(path, one, other):
            yield Change(path=leaf, before=was, after=becomes, effect=Effect.LIVE)


def _sources(spec: ModelSpec) -> tuple[AdapterSource, ...]:
    return spec.adapters.sources if spec.adapters else ()


def _engine(spec: ModelSpec) -> Any:
    """The model without its declared adapters, which are compared by name.

    A calibrated engine model is shortened for display.
    """
    plain = _plain(spec)
    plain["profile"] = describe(spec.profile)
    if plain["adapters"] is not None:
        del plain["adapters"]["sources"]
    return plain


def _whole_model(name: str, one: ModelSpec | None, other: ModelSpec | None, cluster: bool) -> Change:
    before, after = (spec and str(spec.engine) for spec in (one, other))
    path = f"models[{name}]"
    if cluster:
        return _restarted(path, before, after)
    return Change(path=path, before=before, after=after, effect=Effect.LIVE)


def _restarted(path: str, before: Any, after: Any) -> Change:
    why = "whether a controller runs is decided at the start"
    return Change(path=path, before=before, after=after, effect=Effect.RESTART, why=why)


def _rebuilt(one: ModelSpec, other: ModelSpec) -> tuple[str, ...]:
    """Differences that need new engines; empty if the running ones can stay."""
    model = f"models[{one.name}]"
    made = [path for path, _, _ in _leaves(model, engine_inputs(one), engine_inputs(other))]
    shapes = [f"{model}.shapes.{shape}" for shape in changed_shapes(used_shapes(one), other)]
    if (gpu_group_of(one) is None) != (gpu_group_of(other) is None):
        shapes.append(f"{model}.modes")
    return tuple(f"{path}." for path in made + shapes)


def _section_effect(path: str) -> tuple[Effect, str]:
    section, key = path.split(".")[:2]
    if section == "cluster":
        return Effect.RESTART, "the cluster is joined at the start"
    if section == "gateway" and key in _SOCKETS:
        return Effect.RESTART, "the gateway's sockets and workers are made at the start"
    return Effect.LIVE, ""


def _leaves(path: str, one: Any, other: Any) -> Iterator[tuple[str, Any, Any]]:
    """Differences of two plain values: mappings by key, everything else as a whole."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key, was, becomes in _pairs(one, other):
            yield from _leaves(f"{path}.{key}", was, becomes)
    elif one != other:
        yield path, one, other


def _pairs(one: Mapping[str, _T], other: Mapping[str, _T]) -> Iterator[tuple[str, _T | None, _T | None]]:
    """Every key of either with both values, in the order of ``one`` and then of ``other``."""
    return ((key, one.get(key), other.get(key)) for key in {**one, **other})


def _plain(section: msgspec.Struct) -> Any:
    return msgspec.to_builtins(section)
