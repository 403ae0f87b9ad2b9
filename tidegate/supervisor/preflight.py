"""What must be true of this machine before anything starts: free ports, memory, no foreign Ray."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Collection, Mapping
from pathlib import Path

import psutil

from policy.config.deployment import Deployment, ModelSpec
from policy.errors import PreconditionFailed
from policy.types import EngineKind
from store.state_dir import listen

_GIB = 1024**3
# A CPU engine with its imports and its host; measured 3.7 GiB whole with 0.5 GiB of weights
# and a KV cache of 1 GiB.
_ENGINE_BYTES = 2 * _GIB
_WEIGHTS_FACTOR = 1.5
_RAY_PROCESSES = ("gcs_server", "raylet")


def bind(path: str, host: str, port: int) -> socket.socket:
    """A listening socket, or :class:`policy.errors.PreconditionFailed` that names who has the port."""
    try:
        return listen(host, port)
    except OSError as error:
        raise PreconditionFailed(f"{path} {host}:{port}: {_why(port, error)}") from None


def check_ports(wanted: Mapping[str, tuple[str, int]]) -> list[str]:
    """What is wrong with each wanted address (by its path in the document); empty when all are free."""
    problems = []
    for path, (host, port) in wanted.items():
        try:
            bind(path, host, port).close()
        except PreconditionFailed as error:
            problems.append(str(error))
    return problems


def internal_ports(deployment: Deployment, *, ray: bool) -> dict[str, tuple[str, int]]:
    """The addresses, beside the gateway's, that will be listened on by this machine."""
    cluster = deployment.cluster
    if not deployment.needs_controller or (ray and cluster.address != "local"):
        return {}
    host, _, port = cluster.controller.rpartition(":")
    ports = {"cluster.controller": (host, int(port))}
    if ray:
        # The head's GCS binds every interface whatever address it is given.
        ports["cluster.gcs_port"] = ("0.0.0.0", cluster.gcs_port)
        ports["cluster.dashboard_port"] = ("127.0.0.1", cluster.dashboard_port)
    return ports


def foreign_ray(ours: Collection[int]) -> str | None:
    """A Ray that runs on this machine and is not ours, with how to join it instead."""
    found = {
        process.info["name"]: process
        for process in psutil.process_iter(["name"])
        if process.info["name"] in _RAY_PROCESSES and process.pid not in ours
    }
    if not found:
        return None
    processes = ", ".join(f"{name} (pid {process.pid})" for name, process in sorted(found.items()))
    address = _gcs_address(found["raylet"]) if "raylet" in found else None
    return (
        f"another Ray cluster runs on this machine: {processes}; to join it set "
        f"RAY_ADDRESS={address or 'HOST:PORT'} (or cluster.address in the document), or start with --no-ray"
    )


def memory_problem(deployment: Deployment, weights: Mapping[str, int], available: int) -> str | None:
    """Whether the first replicas on CPUs fit ``available`` bytes; ``weights`` holds bytes by model.

    Per replica: 1.5 times the weights, the KV cache (``VLLM_CPU_KVCACHE_SPACE``, in GiB), 2 GiB.
    """
    parts = []
    total = 0.0
    for spec in deployment.models:
        count = _cpu_replicas(spec)
        if count:
            size = weights.get(spec.name, 0)
            kv = _kv_bytes(spec)
            each = size * _WEIGHTS_FACTOR + kv + _ENGINE_BYTES
            total += count * each
            parts.append(
                f"{count} x {each / _GIB:.1f} GiB for {spec.name} (1.5 x {size / _GIB:.1f} of weights, "
                f"{kv / _GIB:.1f} of KV cache, {_ENGINE_BYTES / _GIB:.1f} of engine)"
            )
    if total <= available:
        return None
    return (
        f"too little memory: {total / _GIB:.1f} GiB needed, {available / _GIB:.1f} GiB available; "
        + ", ".join(parts)
    )


def available_memory() -> int:
    """Bytes that new processes may take: the machine's, or the control group's if that is less."""
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
    # Cached files count as used, and are given up under pressure.
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


def _why(port: int, error: OSError) -> str:
    owner = _owner(port) if error.errno == errno.EADDRINUSE else None
    if owner is None:
        return error.strerror or str(error)
    return f"the port is taken by {owner.name()} (pid {owner.pid}); stop it, or choose another port"


def _owner(port: int) -> psutil.Process | None:
    """Who listens on ``port``; unknown for another user's process."""
    try:
        for connection in psutil.net_connections(kind="tcp"):
            local = connection.laddr
            if connection.status != psutil.CONN_LISTEN or not local or not connection.pid:
                continue
            if local.port == port:
                return psutil.Process(connection.pid)
    except psutil.Error:
        return None
    return None


def _gcs_address(raylet: psutil.Process) -> str | None:
    """The cluster that a raylet belongs to, from its command line."""
    flag = "--gcs-address="
    try:
        arguments = raylet.cmdline()
    except psutil.Error:
        return None
    return next((word.removeprefix(flag) for word in arguments if word.startswith(flag)), None)
