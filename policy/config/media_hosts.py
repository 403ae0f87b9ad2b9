"""The key ``media_hosts`` of the section ``gateway``, and what it means for engines."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from msgspec import structs

from policy.config.convert import require
from policy.types import EngineKind

if TYPE_CHECKING:
    from policy.config.deployment import Deployment, ModelSpec

ARGUMENT = "allowed_media_domains"
_HOST = re.compile(r"[a-z0-9][a-z0-9.-]{0,252}")


def fetching(deployment: Deployment) -> Deployment:
    """``deployment`` with vLLM engines that fetch media from its ``gateway.media_hosts``.

    Models whose arguments name domains keep those. Raises :class:`policy.errors.ConfigError` for what is no
    name of a host.
    """
    hosts = deployment.gateway.media_hosts
    for i, host in enumerate(hosts):
        expected = "the name of a host in lower case, without scheme, port and path"
        require(_HOST.fullmatch(host), f"gateway.media_hosts[{i}]", host, expected)
    if not hosts:
        return deployment
    return structs.replace(deployment, models=tuple(_fetching(spec, hosts) for spec in deployment.models))


def allowed_hosts(deployment: Deployment) -> frozenset[str]:
    """The hosts from which any engine of ``deployment`` may fetch media of requests."""
    listed = list(deployment.gateway.media_hosts)
    for args in (args for model in deployment.models for args in _arguments(model)):
        names = args.get(ARGUMENT)
        listed += [str(name) for name in names] if isinstance(names, list) else []
    return frozenset(name.lower() for name in listed)


def _fetching(spec: ModelSpec, hosts: tuple[str, ...]) -> ModelSpec:
    if spec.engine is not EngineKind.VLLM or any(ARGUMENT in args for args in _arguments(spec)):
        return spec
    return structs.replace(spec, engine_args={ARGUMENT: list(hosts), **spec.engine_args})


def _arguments(spec: ModelSpec) -> list[dict[str, Any]]:
    return [spec.engine_args, *(shape.engine_args for shape in spec.shapes.values())]
