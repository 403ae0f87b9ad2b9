"""The differences between two deployments, and the effect of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Any

import msgspec

from policy.config.control import KubernetesLease, LeaderElection
from policy.config.deployment import (
    AdapterSource,
    Cluster,
    Deployment,
    FallbackProviderConfig,
    ModelSpec,
)
from policy.config.engine_revision import changed_shapes, engine_inputs, used_shapes
from policy.config.grpc_ports import GrpcPort
from policy.config.shared_gpus import gpu_group_of
from policy.config.tenancy import Tenant
from policy.config.tls import AdminTls, ServerTls
from policy.engine.performance_model_file import describe
from policy.types import EngineKind


class ChangeEffect(StrEnum):
    """The effect of a change: none, a new generation beside the old one, or a restart."""

    LIVE = "live"
    NEW_GENERATION = "new_generation"
    RESTART = "restart"


class ConfigChange(msgspec.Struct, frozen=True):
    """One value that differs; ``None`` if absent. Paths name entries: ``models[NAME].key``."""

    path: str
    before: Any
    after: Any
    effect: ChangeEffect
    why: str = ""


# The values that need a restart, and why.
_FIXED = {
    **dict.fromkeys(
        (
            *(f"cluster.{key}" for key in Cluster.__struct_fields__),
            *(f"cluster.leader_election.{key}" for key in LeaderElection.__struct_fields__),
            *(f"cluster.leader_election.kubernetes.{key}" for key in KubernetesLease.__struct_fields__),
        ),
        "the cluster is joined at the start",
    ),
    **dict.fromkeys(
        (f"gateway.{key}" for key in ("host", "port", "admin_host", "admin_port", "workers")),
        "the gateway's sockets and workers are made at the start",
    ),
    **dict.fromkeys(
        (
            *("gateway.tls", *(f"gateway.tls.{key}" for key in ServerTls.__struct_fields__)),
            *("gateway.admin_tls", *(f"gateway.admin_tls.{key}" for key in AdminTls.__struct_fields__)),
        ),
        "the gateway's ports get their files at the start",
    ),
    "store": "the database is opened at the start",
    **dict.fromkeys(
        (
            f"{section}{key}"
            for section in ("endpoint_picker", "external_scaler")
            for key in ("", *(f".{name}" for name in GrpcPort.__struct_fields__))
        ),
        "its port is opened at the start",
    ),
}

# What a new generation of a shared GPU group means.
_SHARED = (
    "its shapes share GPUs: unless GPUs are free for both revisions, requests wait while the old one drains"
    " and the new one starts"
)


def diff(old: Deployment, new: Deployment) -> tuple[ConfigChange, ...]:
    """Every value that differs, in the order of the file."""
    before = {spec.name: spec for spec in old.models}
    after = {spec.name: spec for spec in new.models}
    whole = {f"models[{name}]" for name in before.keys() ^ after.keys()}
    rebuilt = tuple(
        path for name in before.keys() & after.keys() for path in _rebuilt(before[name], after[name])
    )
    shared = tuple(
        f"models[{name}]." for name in before.keys() & after.keys() if gpu_group_of(after[name]) is not None
    )
    fixed = _FIXED
    if old.needs_controller != new.needs_controller:
        engines = (f"models[{name}].engine" for name in before)
        fixed = fixed | dict.fromkeys([*whole, *engines], "whether a controller runs is decided at the start")
    # A model of external servers that is scaled from now on.
    taken_over = tuple(
        f"models[{name}]." + "modes." * (name in before)
        for name, spec in after.items()
        if spec.engine is EngineKind.EXTERNAL
        and spec.is_scaled
        and not (name in before and before[name].is_scaled)
    )
    changes = []
    for path, *values in _leaves("", _plain(old), _plain(new)):
        was, becomes = (model and model["engine"] for model in values) if path in whole else values
        effect, why = ChangeEffect.LIVE, fixed.get(path, "")
        if path in fixed:
            effect = ChangeEffect.RESTART
        elif f"{path}.".startswith(taken_over):
            effect, why = ChangeEffect.RESTART, "the pods of its workloads are taken over at the start"
        elif f"{path}.".startswith(rebuilt) and ".adapters.sources[" not in path:
            effect = ChangeEffect.NEW_GENERATION
            why = _SHARED * path.startswith(shared)
        changes.append(ConfigChange(path, was, becomes, effect, why))
    return tuple(changes)


def _plain(deployment: Deployment) -> dict[str, Any]:
    """The deployment as mappings; the order of models, tenants and other named entries does not matter."""
    sections = ("budget", "cluster", "gateway", "store", "tracing", "endpoint_picker", "external_scaler")
    return {
        "models": {f"[{spec.name}]": _plain_model(spec) for spec in deployment.models},
        **{section: msgspec.to_builtins(getattr(deployment, section)) for section in sections},
        "tenants": _by_name(deployment.tenants),
        "upstreams": _by_name(deployment.upstreams),
    }


def _plain_model(spec: ModelSpec) -> dict[str, Any]:
    """The model with its declared adapters by name; a calibrated engine model is shortened for display."""
    plain: dict[str, Any] = msgspec.to_builtins(spec)
    plain["profile"] = describe(spec.profile)
    if spec.adapters is not None:
        del plain["adapters"]["sources"]
    return plain | {"adapters.sources": _by_name(spec.adapters.sources if spec.adapters else ())}


def _by_name(entries: Iterable[Tenant | FallbackProviderConfig | AdapterSource]) -> dict[str, Any]:
    return {f"[{entry.name}]": msgspec.to_builtins(entry) for entry in entries}


def _rebuilt(one: ModelSpec, other: ModelSpec) -> Iterator[str]:
    """The differences that need new engines, each with a dot at its end."""
    model = f"models[{one.name}]"
    for path, _, _ in _leaves(model, engine_inputs(one), engine_inputs(other)):
        yield f"{path}."
    for shape in changed_shapes(used_shapes(one), other):
        yield f"{model}.shapes.{shape}."
    if (gpu_group_of(one) is None) != (gpu_group_of(other) is None):
        yield f"{model}.modes."


def _leaves(path: str, one: Any, other: Any) -> Iterator[tuple[str, Any, Any]]:
    """Differences of two plain values: mappings by key, everything else as a whole."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in {**one, **other}:
            inner = f"{path}{key}" if key.startswith("[") or not path else f"{path}.{key}"
            yield from _leaves(inner, one.get(key), other.get(key))
    elif one != other:
        yield path, one, other
