"""Parse the deployment file: decoded YAML into a checked :class:`policy.config.deployment.Deployment`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from policy.config.convert import convert, convert_values
from policy.config.deployment import (
    ENTRY_NAME,
    FORBIDDEN_ENV,
    MODES,
    NAME,
    OWNED_ENGINE_ARGS,
    SHAPE_NAME,
    Budget,
    Deployment,
    Mode,
    ModelSpec,
    Shape,
    Tenant,
    Upstream,
)
from policy.deployment_file.adapter_checks import check_adapters, convert_versions
from policy.engine.builtin_profiles import profile
from policy.errors import ConfigError
from policy.scaling.policies.registry import choose
from policy.types import EngineKind

_DIGEST = re.compile(r"[0-9a-f]{64}")
_VISIBLE = re.compile(r"[!-~]+")


def parse(document: object) -> Deployment:
    """Decode and check a whole document.

    Raises :class:`policy.errors.ConfigError` for unknown keys, wrong types, values out of range, modes of
    unknown shapes, shapes that do not fit the budget, a controller that other nodes cannot reach, keys shared
    by two tenants, and fallback providers for unknown models.
    """
    if not isinstance(document, Mapping):
        raise ConfigError("$", document, "a mapping with the key 'models'")
    models = document.get("models")
    for i, model in enumerate(models if isinstance(models, list) else []):
        if isinstance(model, Mapping):
            convert_values(model, "shapes", Shape, f"models[{i}]")
            convert_values(model, "modes", Mode, f"models[{i}]")
            convert_values(model, "env", str, f"models[{i}]")
            convert_versions(model, f"models[{i}]")
    upstreams = document.get("upstreams")
    for i, upstream in enumerate(upstreams if isinstance(upstreams, list) else []):
        if isinstance(upstream, Mapping):
            convert_values(upstream, "models", str, f"upstreams[{i}]")
    deployment = convert(document, Deployment, "")
    seen: set[str] = set()
    for i, spec in enumerate(deployment.models):
        path = f"models[{i}]"
        if not NAME.fullmatch(spec.name):
            raise ConfigError(f"{path}.name", spec.name, f"a name that matches {NAME.pattern}")
        if spec.name in seen:
            raise ConfigError(f"{path}.name", spec.name, "a name that no other model has")
        seen.add(spec.name)
        profile(spec.sim.profile, f"{path}.sim.profile")
        if spec.profile is not None:
            profile(spec.profile, f"{path}.profile")
        choose(f"{path}.control.policy", spec.control.policy)
        if spec.control.shadow is not None:
            choose(f"{path}.control.shadow", spec.control.shadow)
        if spec.engine is EngineKind.EXTERNAL:
            _check_external(path, spec)
        else:
            _check_deployed(path, spec, deployment)
    tenants = {tenant.name for tenant in deployment.tenants}
    for i, spec in enumerate(deployment.models):
        check_adapters(f"models[{i}]", spec, seen, tenants)
    _check_cluster(deployment)
    _check_gateway(deployment)
    _check_store(deployment.store)
    _check_tenants(deployment.tenants)
    _check_upstreams(deployment.upstreams, seen)
    return deployment


def _check_external(path: str, spec: ModelSpec) -> None:
    if not spec.urls:
        raise ConfigError(f"{path}.urls", list(spec.urls), "at least one base URL for an external engine")
    for i, url in enumerate(spec.urls):
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or parts.query or parts.path not in ("", "/", "/v1"):
            raise ConfigError(f"{path}.urls[{i}]", url, "http://HOST:PORT, optionally ending in /v1")
    for key in ("source", "shapes", "modes", "mode", "engine_args", "env"):
        if getattr(spec, key):
            raise ConfigError(
                f"{path}.{key}", getattr(spec, key), "nothing: Tidegate does not deploy an external engine"
            )


def _check_deployed(path: str, spec: ModelSpec, deployment: Deployment) -> None:
    if spec.urls:
        raise ConfigError(f"{path}.urls", list(spec.urls), "urls only with engine: external")
    if spec.engine is EngineKind.VLLM and not spec.source:
        raise ConfigError(
            f"{path}.source", spec.source, "package:NAME, a local path or a Hugging Face id (ORG/NAME)"
        )
    for key in ("shapes", "modes"):
        if not getattr(spec, key):
            raise ConfigError(f"{path}.{key}", {}, "at least one entry")
    for name, shape in spec.shapes.items():
        _check_shape(f"{path}.shapes.{name}", name, shape, deployment)
    for name, mode in spec.modes.items():
        _check_mode(f"{path}.modes.{name}", name, mode, spec, deployment)
    _check_affordable(spec, deployment.budget)
    if spec.mode is not None and spec.mode not in spec.modes:
        raise ConfigError(f"{path}.mode", spec.mode, f"one of the modes: {', '.join(spec.modes)}")
    _check_engine_args(f"{path}.engine_args", spec.engine_args)
    for key in sorted(FORBIDDEN_ENV & set(spec.env)):
        raise ConfigError(
            f"{path}.env.{key}", spec.env[key], "a variable that Tidegate does not guard or set"
        )


def _check_shape(path: str, name: str, shape: Shape, deployment: Deployment) -> None:
    if not SHAPE_NAME.fullmatch(name):
        raise ConfigError(path, name, f"a shape name that matches {SHAPE_NAME.pattern}")
    if shape.gpus and shape.tensor_parallel != shape.gpus:
        raise ConfigError(
            f"{path}.tensor_parallel", shape.tensor_parallel, f"{shape.gpus}, one rank per GPU of the shape"
        )
    if not shape.gpus and shape.tensor_parallel != 1:
        raise ConfigError(f"{path}.tensor_parallel", shape.tensor_parallel, "1 for a shape without GPUs")
    if not shape.gpus and not shape.cpus:
        raise ConfigError(path, {"gpus": 0, "cpus": 0}, "gpus or cpus of at least 1")
    for key in ("gpus", "cpus"):
        limit = getattr(deployment.budget, key)
        if limit is not None and getattr(shape, key) > limit:
            raise ConfigError(f"{path}.{key}", getattr(shape, key), f"at most budget.{key} = {limit}")
    _check_engine_args(f"{path}.engine_args", shape.engine_args)


def _check_mode(path: str, name: str, mode: Mode, spec: ModelSpec, deployment: Deployment) -> None:
    if name not in MODES:
        raise ConfigError(path, name, f"one of: {', '.join(MODES)}")
    shape = spec.shapes.get(mode.shape)
    if shape is None:
        raise ConfigError(f"{path}.shape", mode.shape, f"one of the shapes: {', '.join(spec.shapes)}")
    bounds = mode.bounds
    if bounds.min > bounds.max:
        raise ConfigError(f"{path}.replicas.min", bounds.min, f"at most replicas.max = {bounds.max}")
    if name == "single-large" and bounds.max != 1:
        raise ConfigError(f"{path}.replicas", bounds.max, "1: single-large is one replica")
    for key in ("gpus", "cpus"):
        limit = getattr(deployment.budget, key)
        wanted = getattr(shape, key) * bounds.max
        if limit is not None and wanted > limit:
            each = getattr(shape, key)
            expected = f"at most {limit // each}: each needs {each} of budget.{key} = {limit}"
            raise ConfigError(f"{path}.replicas", bounds.max, expected)


def _check_affordable(spec: ModelSpec, budget: Budget) -> None:
    """Refuse power or cost budgets that are too small for the minimum of every mode."""
    for key, gpu, cpu in (
        ("watts", budget.gpu_watts, budget.cpu_watts),
        ("cost_per_h", budget.gpu_cost_per_h, budget.cpu_cost_per_h),
    ):
        needs = [
            max(1, mode.bounds.min) * (shape.gpus * gpu + shape.cpus * cpu)
            for mode in spec.modes.values()
            for shape in (spec.shapes[mode.shape],)
        ]
        limit = getattr(budget, key)
        if limit is not None and min(needs) > limit:
            raise ConfigError(f"budget.{key}", limit, f"at least {min(needs):g}, which {spec.name} needs")


def _check_engine_args(path: str, args: Mapping[str, Any]) -> None:
    for key, value in args.items():
        flat = key.replace("-", "_")
        if flat in OWNED_ENGINE_ARGS:
            raise ConfigError(f"{path}.{key}", value, "an argument that Tidegate does not set itself")
        if not re.fullmatch(r"[a-z][a-z0-9_]*", key):
            raise ConfigError(f"{path}.{key}", value, "a name of an engine argument in snake_case")


def _check_cluster(deployment: Deployment) -> None:
    cluster = deployment.cluster
    _check_host_port("cluster.controller", cluster.controller)
    joined = deployment.needs_controller and cluster.address != "local"
    if joined and _loopback(cluster.controller) and not _loopback(cluster.address):
        expected = f"HOST:PORT that every node of cluster.address = {cluster.address!r} reaches"
        raise ConfigError("cluster.controller", cluster.controller, expected)


def _loopback(address: str) -> bool:
    host = address.rpartition("/")[2].rpartition(":")[0].strip("[]")
    return host in ("localhost", "::1") or re.fullmatch(r"127(\.\d{1,3}){3}", host) is not None


def _check_host_port(path: str, value: str) -> None:
    host, _, port = value.rpartition(":")
    if not host or not port.isdigit() or not 1 <= int(port) <= 65_535:
        raise ConfigError(path, value, "HOST:PORT")


def _check_gateway(deployment: Deployment) -> None:
    gateway = deployment.gateway
    if (gateway.port, gateway.host) == (gateway.admin_port, gateway.admin_host):
        raise ConfigError("gateway.admin_port", gateway.admin_port, "a port other than gateway.port")
    eject = gateway.eject
    if eject.base_s > eject.max_s:
        expected = f"at most gateway.eject.max_s = {eject.max_s:g}"
        raise ConfigError("gateway.eject.base_s", eject.base_s, expected)
    coalesce = gateway.coalesce
    if coalesce.window_s >= gateway.queue_timeout_s:
        expected = f"less than gateway.queue_timeout_s = {gateway.queue_timeout_s:g}"
        raise ConfigError("gateway.coalesce.window_s", coalesce.window_s, expected)


def _check_store(store: str) -> None:
    scheme, colon, rest = store.partition("://")
    embedded = scheme == "sqlite" and len(rest) > 1 and rest.startswith("/") and "?" not in rest
    served = scheme in ("postgresql", "postgres", "postgresql+psycopg") and _VISIBLE.fullmatch(rest)
    if store and not (colon and (embedded or served)):
        # The part before the @ may contain a password.
        raise ConfigError(
            "store", "***" if "@" in store else store, "sqlite:///PATH or postgresql://HOST/NAME"
        )


def _check_tenants(tenants: tuple[Tenant, ...]) -> None:
    seen: set[str] = set()
    owners: dict[str, str] = {}
    for i, tenant in enumerate(tenants):
        _check_entry_name(f"tenants[{i}].name", tenant.name, seen, "tenant")
        for j, digest in enumerate(tenant.keys_sha256):
            path = f"tenants[{i}].keys_sha256[{j}]"
            if not _DIGEST.fullmatch(digest):
                # The value may be the key itself, so it is not shown.
                raise ConfigError(
                    path, "***", "64 hex digits in lower case, as `tidegate keys new` prints them"
                )
            if digest in owners:
                taken = f"a digest that stands nowhere else (tenant {owners[digest]!r} has it)"
                raise ConfigError(path, f"{digest[:8]}...", taken)
            owners[digest] = tenant.name


def _check_upstreams(upstreams: tuple[Upstream, ...], models: set[str]) -> None:
    seen: set[str] = set()
    for i, upstream in enumerate(upstreams):
        path = f"upstreams[{i}]"
        _check_entry_name(f"{path}.name", upstream.name, seen, "upstream")
        _check_url(f"{path}.url", upstream.url)
        for name, theirs in upstream.models.items():
            model, colon, adapter = name.partition(":")
            if model not in models or (colon and not ENTRY_NAME.fullmatch(adapter)):
                known = ", ".join(sorted(models))
                expected = f"one of the models as the key, or MODEL:ADAPTER: {known}"
                raise ConfigError(f"{path}.models.{name}", theirs, expected)
            if not theirs:
                raise ConfigError(f"{path}.models.{name}", theirs, "the name that the upstream calls it by")


def _check_entry_name(path: str, name: str, seen: set[str], kind: str) -> None:
    if not ENTRY_NAME.fullmatch(name):
        raise ConfigError(path, name, f"a name that matches {ENTRY_NAME.pattern}")
    if name in seen:
        raise ConfigError(path, name, f"a name that no other {kind} has")
    seen.add(name)


def _check_url(path: str, url: str) -> None:
    parts = urlsplit(url)
    try:
        port_is_good = parts.port != 0
    except ValueError:
        port_is_good = False
    good = parts.scheme in ("http", "https") and parts.hostname and port_is_good and _VISIBLE.fullmatch(url)
    if not good or parts.query or parts.fragment or "@" in parts.netloc:
        shown = "***" if "@" in parts.netloc else url  # the part before the @ may contain a password
        raise ConfigError(path, shown, "http(s)://HOST[:PORT][/PATH], as in https://api.example.com/v1")
