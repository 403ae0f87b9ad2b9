"""Preconditions of a start on this machine: free ports, enough memory, no other Ray cluster."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import msgspec
import psutil

from policy.config.deployment import Deployment, ModelSpec
from policy.config.port_conflicts import may_be_open
from policy.config.shared_gpus import gpu_group_of
from policy.errors import ConfigError, PreconditionFailed
from policy.types import EngineKind
from policy.wire.access_snapshot import SnapshotHead, SnapshotLine
from store.state_dir import StateDir, listen
from store.tls_files import days_left, every_port_with_tls

_GIB = 1024**3
# A CPU engine and its host process; 3.7 GiB were measured with 0.5 GiB of weights and a 1 GiB KV cache.
_ENGINE_BYTES = 2 * _GIB
_WEIGHTS_FACTOR = 1.5
_RAY_PROCESSES = ("gcs_server", "raylet")


def bind(path: str, host: str, port: int) -> socket.socket:
    """A listening socket; raises :class:`policy.errors.PreconditionFailed` with the process on the port."""
    try:
        return listen(host, port)
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE and (owner := _owner(port)) is not None:
            why = f"the port is in use by {owner.name()} (pid {owner.pid}); stop it, or choose another port"
        raise PreconditionFailed(f"{path} {host}:{port}: {why}") from None


def check_keys(deployment: Deployment, state: StateDir) -> None:
    """Refuse an API that other machines reach before there is a tenant, with :class:`ConfigError`.

    Of the database those count that the state directory knows of.
    """
    if not (may_be_open(deployment.gateway) or deployment.tenants or has_tenants(state)):
        expected = (
            "127.0.0.1, as there is neither a tenant nor a key (docs/tenants.md);"
            " gateway.allow_unauthenticated: true serves every machine without keys"
        )
        raise ConfigError("gateway.host", deployment.gateway.host, expected)


def has_tenants(state: StateDir) -> bool:
    """Whether the database had tenants or keys when the accounting process wrote them last."""
    try:
        with state.access_path.open("rb") as file:
            head = msgspec.json.decode(file.readline(), type=SnapshotLine)
    except (OSError, msgspec.MsgspecError):
        return False
    return isinstance(head, SnapshotHead) and head.tenants + head.keys > 0


def problems_of_access(deployment: Deployment, state: StateDir | None) -> list[str]:
    """What is wrong with the certificates of the ports, and with keys if there is a ``state``."""
    checks: list[Callable[[], object]] = [
        partial(days_left, files, path, time.time())
        for path, files in every_port_with_tls(deployment).items()
    ]
    if state is not None:
        checks.append(partial(check_keys, deployment, state))
    problems = []
    for check in checks:
        try:
            check()
        except ConfigError as error:
            problems.append(str(error))
    return problems


def foreign_ray(ours: Collection[int]) -> str | None:
    """An error for a Ray cluster of others on this machine, with instructions to join it; or ``None``."""
    others = {
        process.info["name"]: process
        for process in psutil.process_iter(["name"])
        if process.info["name"] in _RAY_PROCESSES and process.pid not in ours
    }
    if not others:
        return None
    processes = ", ".join(f"{name} (pid {process.pid})" for name, process in sorted(others.items()))
    address = _gcs_address(others["raylet"]) if "raylet" in others else None
    return (
        f"another Ray cluster runs on this machine: {processes}; to join it set RAY_ADDRESS="
        f"{address or 'HOST:PORT'} (or cluster.address in the deployment file), or start with --no-ray"
    )


def memory_problem(deployment: Deployment, weights: Mapping[str, int], available: int) -> str | None:
    """An error if the first engines do not fit in ``available`` bytes; ``weights`` has bytes by model."""
    parts = memory_needs(deployment, weights)
    total = sum(parts.values())
    if total <= available:
        return None
    return (
        f"too little memory: {total / _GIB:.1f} GiB needed, {available / _GIB:.1f} GiB available; "
        + ", ".join(parts)
    )


def memory_needs(deployment: Deployment, weights: Mapping[str, int]) -> dict[str, float]:
    """The bytes of host memory that the first engines need, by what for; ``weights`` has bytes by model.

    Per CPU replica: 1.5 times the weights, the KV cache (``VLLM_CPU_KVCACHE_SPACE``, in GiB), 2 GiB. Of a
    shared GPU group all engines but one may sleep, each with its weights in host memory.
    """
    parts: dict[str, float] = {}
    for spec in deployment.models:
        size = weights.get(spec.name, 0)
        if size and spec.engine is EngineKind.VLLM and (group := gpu_group_of(spec)) is not None:
            asleep = sum(group.engines.values()) - 1
            what = (
                f"{asleep} x {size / _GIB:.1f} GiB for the weights of sleeping engines of {spec.name}"
                " (control.mode.sleep: never starts and stops engines instead)"
            )
            parts[what] = asleep * size
        if not (count := _cpu_replicas(spec)):
            continue
        kv = _kv_bytes(spec)
        each = size * _WEIGHTS_FACTOR + kv + _ENGINE_BYTES
        what = (
            f"{count} x {each / _GIB:.1f} GiB for {spec.name} (1.5 x {size / _GIB:.1f} of weights, "
            f"{kv / _GIB:.1f} of KV cache, {_ENGINE_BYTES / _GIB:.1f} of engine)"
        )
        parts[what] = count * each
    return parts


def missing_package(deployment: Deployment) -> str | None:
    """What to install for the gRPC ports that are configured."""
    if not deployment.grpc_ports:
        return None
    found = find_spec("grpc") and find_spec("google") and find_spec("google.protobuf")
    return (
        None
        if found
        else f"{next(iter(deployment.grpc_ports))} needs grpcio and protobuf of the lock files: make install"
    )


def available_memory() -> int:
    """Bytes available to new processes: the machine's, or the control group's if lower."""
    available = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        stats = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return available
    if limit == "max":
        return available
    # The page cache counts as used, but is reclaimed under memory pressure.
    return min(available, max(0, int(limit) - used + int(stats.get("inactive_file", 0))))


def weights_bytes(directory: Path) -> int:
    """The size of the weight files in a model's directory."""
    return sum(
        file.stat().st_size
        for pattern in ("*.safetensors", "*.bin", "*.gguf")
        for file in directory.glob(pattern)
    )


def _cpu_replicas(spec: ModelSpec) -> int:
    if spec.engine is not EngineKind.VLLM:
        return 0
    mode = spec.modes[spec.first_mode]
    return 0 if spec.shapes[mode.shape].gpus else mode.bounds.min


def _kv_bytes(spec: ModelSpec) -> int:
    text = spec.env.get("VLLM_CPU_KVCACHE_SPACE", os.environ.get("VLLM_CPU_KVCACHE_SPACE", "0"))
    try:
        return int(float(text) * _GIB)
    except ValueError:
        return 0


def _owner(port: int) -> psutil.Process | None:
    """The process that listens on ``port``; ``None`` for another user's process."""
    with contextlib.suppress(psutil.Error):
        for each in psutil.net_connections(kind="tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port and each.pid:
                return psutil.Process(each.pid)
    return None


def _gcs_address(raylet: psutil.Process) -> str | None:
    """The cluster address on a raylet's command line."""
    flag = "--gcs-address="
    with contextlib.suppress(psutil.Error):
        return next((word.removeprefix(flag) for word in raylet.cmdline() if word.startswith(flag)), None)
    return None
