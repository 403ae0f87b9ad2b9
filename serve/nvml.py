"""NVML, the library of NVIDIA's driver. What a GPU does not report is no error."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class NvmlMissing(Exception):
    """NVML cannot be used; the text says why."""


def load_nvml() -> Any:
    """NVML, initialized; raises :class:`NvmlMissing` without the library or a driver. Blocks."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        raise NvmlMissing("nvidia-ml-py is not installed") from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise NvmlMissing(str(error)) from error
    return nvml


def gpu_handle(nvml: Any, name: str) -> Any:
    """The GPU with this index or UUID; raises the library's ``NVMLError`` if there is none."""
    if name.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    return nvml.nvmlDeviceGetHandleByUUID(name)


def ask(nvml: Any, gpu: Any, question: Callable[..., T], *more: Any) -> T | None:
    """The answer of a GPU; ``None`` if it does not support the question."""
    try:
        return question(gpu, *more)
    except nvml.NVMLError:
        return None
