"""Read a deployment file: YAML to a checked :class:`policy.config.deployment.Deployment`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from policy.config.deployment import Deployment
from policy.config.tls import AdminTls
from policy.deployment_file.parse import parse
from policy.engine.performance_model_file import model_file
from policy.errors import ConfigError
from serve.autoscaler.custom_policy import beside
from store.time_zones import is_time_zone
from store.yaml_file import read_yaml

# Listening addresses depend on the environment: loopback inside a container is unreachable.
_ALLOW = "TIDEGATE_ALLOW_UNAUTHENTICATED"
_HOSTS = {"host": "TIDEGATE_GATEWAY_HOST", "admin_host": "TIDEGATE_ADMIN_HOST"}


@dataclass(frozen=True)
class DeploymentDocument:
    """A deployment file with absolute paths; ``raw`` is what is stored and sent to the controller."""

    raw: dict[str, Any]
    deployment: Deployment


def load(path: Path, *, ray: bool = True) -> DeploymentDocument:
    """Read and check the YAML (or JSON) file at ``path``.

    Relative paths are relative to the file's folder, and a calibrated performance model is embedded, so that
    other machines do not need its file. ``RAY_ADDRESS`` replaces ``cluster.address: local`` if ``ray`` is
    used; ``TIDEGATE_GATEWAY_HOST`` and ``TIDEGATE_ADMIN_HOST`` replace ``gateway.host`` and
    ``gateway.admin_host``, and ``TIDEGATE_ALLOW_UNAUTHENTICATED=1`` sets that key. Raises
    :class:`policy.errors.ConfigError`.
    """
    path = path.resolve()
    raw = read_yaml(path, "models")
    _embed_model_files(raw, path.parent)
    _check_time_zones(parse(raw))  # from here on the types are valid
    _absolute_paths(raw, path.parent)
    address = os.environ.get("RAY_ADDRESS") if ray else None
    if address and raw.get("cluster", {}).get("address", "local") == "local":
        raw["cluster"] = {**raw.get("cluster", {}), "address": address}
    for key, variable in _HOSTS.items():
        if host := os.environ.get(variable):
            raw["gateway"] = {**raw.get("gateway", {}), key: host}
    if os.environ.get(_ALLOW) == "1":
        raw["gateway"] = {**raw.get("gateway", {}), "allow_unauthenticated": True}
    return DeploymentDocument(raw=raw, deployment=parse(raw))


def _check_time_zones(deployment: Deployment) -> None:
    for i, spec in enumerate(deployment.models):
        for j, schedule in enumerate(spec.control.scale.schedules):
            if not is_time_zone(schedule.timezone):
                path = f"models[{i}].control.scale.schedules[{j}].timezone"
                raise ConfigError(path, schedule.timezone, "a time zone, as in Europe/Berlin")


def _embed_model_files(raw: dict[str, Any], folder: Path) -> None:
    """Replace the file name of a calibrated performance model (``*.json``) by the file's content."""
    models = raw.get("models")
    for i, model in enumerate(models if isinstance(models, list) else []):
        profile = model.get("profile") if isinstance(model, Mapping) else None
        if isinstance(profile, str) and profile.endswith(".json"):
            at = f"models[{i}].profile"
            model["profile"] = _model_file(_absolute(profile, folder, at), at)


def _model_file(path: Path, where: str) -> dict[str, Any]:
    try:
        content = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ConfigError(where, str(path), f"a file that can be read ({error.strerror})") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(where, str(path), f"JSON, as `tidegate calibrate` writes it ({error})") from None
    model_file(content, str(path))
    return content


def _absolute(path: str, folder: Path, where: str) -> Path:
    try:
        found = (folder / Path(path).expanduser()).resolve()
        found.exists()  # a name may be too long, or its folder closed
    except (OSError, RuntimeError, ValueError) as error:  # an unknown user, a loop of links, a NUL character
        raise ConfigError(where, path, f"a path that can be looked up ({error})") from None
    return found


def _absolute_paths(raw: dict[str, Any], folder: Path) -> None:
    for i, model in enumerate(raw["models"]):
        source = model.get("source", "")
        if source and (local := _local(source, folder, f"models[{i}].source")) is not None:
            if not local.exists():
                raise ConfigError(f"models[{i}].source", source, f"a path that exists (looked at {local})")
            model["source"] = str(local)
        _absolute_file(model, "token_file", f"models[{i}]", folder)
        for j, server in enumerate(model.get("urls", [])):
            if isinstance(server, dict):
                _absolute_file(server, "key_file", f"models[{i}].urls[{j}]", folder)
                _absolute_file(server, "ca_file", f"models[{i}].urls[{j}]", folder)
        if isinstance(found := model.get("discovery"), dict):
            for key in ("file", "key_file", "ca_file"):
                _absolute_file(found, key, f"models[{i}].discovery", folder)
        # An adapter may be missing: the deployment file is valid without it.
        for j, adapter in enumerate((model.get("adapters") or {}).get("sources", [])):
            for entry in (adapter, *adapter.get("versions", {}).values()):
                for key in ("path", "source"):
                    if (source := entry.get(key)) and "://" not in source and not source.startswith("hf:"):
                        entry[key] = str(
                            _absolute(source, folder, f"models[{i}].adapters.sources[{j}].{key}")
                        )
        control = model.get("control", {})
        for key in ("policy", "shadow"):
            if control.get(key) is not None:
                control[key] = beside(control[key], folder)
    for name in ("endpoint_picker", "external_scaler"):
        if isinstance(port := raw.get(name), dict):
            for key in ("cert_file", "key_file", "client_ca_file"):
                _absolute_file(port, key, name, folder)
    for i, upstream in enumerate(raw.get("upstreams", [])):
        _absolute_file(upstream, "key_file", f"upstreams[{i}]", folder)
    for port in ("tls", "admin_tls"):
        if section := raw.get("gateway", {}).get(port):
            for key in AdminTls.__struct_fields__:
                _absolute_file(section, key, f"gateway.{port}", folder)
    if (store := raw.get("store", "")).startswith("sqlite:///"):
        raw["store"] = f"sqlite:///{_absolute(store.removeprefix('sqlite:///'), folder, 'store')}"


def _absolute_file(entry: dict[str, Any], key: str, prefix: str, folder: Path) -> None:
    if entry.get(key):
        path = _absolute(entry[key], folder, f"{prefix}.{key}")
        if not path.is_file():
            raise ConfigError(f"{prefix}.{key}", entry[key], f"a file that exists (looked at {path})")
        entry[key] = str(path)


def _local(source: str, folder: Path, where: str) -> Path | None:
    """The directory of ``source``, or ``None`` for a package or a Hugging Face id.

    ``ORG/NAME`` is a path only if that folder exists beside the file.
    """
    path = _absolute(source, folder, where)
    is_path = source.startswith((".", "/", "~")) or path.exists()
    return path if is_path and not source.startswith("package:") else None
