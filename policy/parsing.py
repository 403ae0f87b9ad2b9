"""From a decoded YAML document to a :class:`policy.config.Deployment`, or a refusal that helps."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import inspect

from policy.config import (
    FORBIDDEN_ENV,
    MODES,
    NAME,
    OWNED_ENGINE_ARGS,
    SHAPE_NAME,
    Deployment,
    Mode,
    ModelSpec,
    Shape,
)
from policy.errors import ConfigError
from policy.types import EngineKind

T = TypeVar("T")

_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<key>.*)`")
_MISSING = re.compile(r"Object missing required field `(?P<key>.*)`")
_ENUM = re.compile(r"Invalid enum value")


def parse(document: object) -> Deployment:
    """Decode and check a whole document.

    Raises :class:`policy.errors.ConfigError` for unknown keys, wrong types, values out of range,
    modes that name no shape, shapes that do not fit the budget, and a controller that other nodes
    cannot reach. Nothing is half-parsed.
    """
    if not isinstance(document, Mapping):
        raise ConfigError("$", document, "a mapping with the key 'models'")
    models = document.get("models")
    for i, model in enumerate(models if isinstance(models, list) else []):
        if isinstance(model, Mapping):
            _convert_values(model, "shapes", Shape, f"models[{i}]")
            _convert_values(model, "modes", Mode, f"models[{i}]")
            _convert_values(model, "env", str, f"models[{i}]")
    deployment = _convert(document, Deployment, "")
    seen: set[str] = set()
    for i, spec in enumerate(deployment.models):
        path = f"models[{i}]"
        if not NAME.fullmatch(spec.name):
            raise ConfigError(f"{path}.name", spec.name, f"a name that matches {NAME.pattern}")
        if spec.name in seen:
            raise ConfigError(f"{path}.name", spec.name, "a name that no other model has")
        seen.add(spec.name)
        if spec.engine is EngineKind.EXTERNAL:
            _check_external(path, spec)
        else:
            _check_deployed(path, spec, deployment)
    _check_cluster(deployment)
    gateway = deployment.gateway
    if (gateway.port, gateway.host) == (gateway.admin_port, gateway.admin_host):
        raise ConfigError("gateway.admin_port", gateway.admin_port, "a port other than gateway.port")
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


def _convert_values(model: Mapping[str, Any], key: str, kind: type[T], prefix: str) -> None:
    """Check each value of a mapping on its own: msgspec's path does not name the key it is under."""
    values = model.get(key)
    if isinstance(values, Mapping):
        for name, value in values.items():
            _convert(value, kind, f"{prefix}.{key}.{name}")


def _convert(raw: object, kind: type[T], prefix: str) -> T:
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise _located(str(error), raw, kind, prefix) from None


def _located(text: str, raw: object, kind: type[Any], prefix: str) -> ConfigError:
    match = _AT.match(text)
    what, path = (match["what"], match["path"] or "") if match else (text, "")
    value = _value_at(raw, path)
    dotted = f"{prefix}{path}".lstrip(".") or "$"
    if (found := _UNKNOWN.match(what)) is not None:
        key = found["key"]
        known = _fields_at(kind, path)
        close = difflib.get_close_matches(key, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        inner = value.get(key) if isinstance(value, Mapping) else value
        where = f"{dotted}.{key}" if dotted != "$" else key
        return ConfigError(where, inner, f"one of the keys: {', '.join(known)}{hint}")
    if (found := _MISSING.match(what)) is not None:
        where = f"{dotted}.{found['key']}" if dotted != "$" else found["key"]
        return ConfigError(where, None, "a value: this key is required")
    if _ENUM.match(what):
        return ConfigError(dotted, value, f"one of: {', '.join(_members_at(kind, path))}")
    expected = re.sub(r"^Expected ", "", what)
    return ConfigError(dotted, value, re.sub(r", got .*$", "", expected).replace("`", ""))


def _steps(path: str) -> list[str]:
    return re.findall(r"[^.\[\]]+", path)


def _value_at(raw: Any, path: str) -> Any:
    for step in _steps(path):
        if isinstance(raw, Mapping):
            raw = raw.get(step)
        elif isinstance(raw, list) and step.isdigit():
            raw = raw[int(step)]
    return raw


def _type_at(kind: Any, path: str) -> inspect.Type:
    """The declared type under ``path``; unions yield their structured member."""
    info = _plain(inspect.type_info(kind))
    for step in _steps(path):
        if step.isdigit() and isinstance(info, inspect.VarTupleType):
            info = _plain(info.item_type)
        elif isinstance(info, inspect.StructType):
            info = _plain(next(field.type for field in info.fields if field.encode_name == step))
    return info


def _plain(info: inspect.Type) -> inspect.Type:
    if isinstance(info, inspect.Metadata):
        return _plain(info.type)
    if isinstance(info, inspect.UnionType):
        return next((member for member in info.types if isinstance(member, inspect.StructType)), info)
    return info


def _fields_at(kind: Any, path: str) -> list[str]:
    info = _type_at(kind, path)
    return [field.encode_name for field in info.fields] if isinstance(info, inspect.StructType) else []


def _members_at(kind: Any, path: str) -> list[str]:
    info = _type_at(kind, path)
    return [str(member) for member in info.cls] if isinstance(info, inspect.EnumType) else []
