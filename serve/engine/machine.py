"""A short description of the hardware that an engine runs on, stored with its measurements."""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
from collections.abc import Mapping
from pathlib import Path

from policy.types import EngineKind
from serve.engine.port import EngineSpec
from serve.gpu_metrics import devices

CPUINFO = Path("/proc/cpuinfo")


def describe_machine(
    spec: EngineSpec, environment: Mapping[str, str] = os.environ, cpuinfo: Path = CPUINFO
) -> str:
    """The GPUs or cores of the engine that ``spec`` describes."""
    if spec.kind is EngineKind.SIM:
        return f"simulated: {spec.sim.profile} at {spec.sim.speed:g} times its speed"
    if spec.cpus:
        return f"{spec.cpus} of {os.cpu_count()} cores of {_cpu(cpuinfo)}"
    return f"{spec.tensor_parallel} x {_card(spec.tensor_parallel, environment)}"


def _cpu(cpuinfo: Path) -> str:
    with contextlib.suppress(OSError):
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.machine()


def _card(count: int, environment: Mapping[str, str]) -> str:
    """The name of the first GPU, as all of a replica are alike; unknown without NVML."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return "GPU"
    with contextlib.suppress(nvml.NVMLError):
        nvml.nvmlInit()
        for name in devices(count, environment):
            by = nvml.nvmlDeviceGetHandleByIndex if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID
            return str(nvml.nvmlDeviceGetName(by(int(name) if name.isdigit() else name)))
    return "GPU"
