"""What an engine says it runs on."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from policy.types import EngineKind
from serve.engine.interface import EngineSpec
from serve.engine.main import describe_machine
from tests.serve.sim_driver import spec


def vllm(**over: object) -> EngineSpec:
    return msgspec.structs.replace(spec(), kind=EngineKind.VLLM, **over)


def test_cores_are_described_by_their_processor(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Fast CPU @ 3 GHz\n")
    said = describe_machine(vllm(cpus=2), cpuinfo=info)
    assert said.startswith("2 of ")
    assert said.endswith(" cores of Fast CPU @ 3 GHz")
    assert describe_machine(vllm(cpus=2), cpuinfo=tmp_path / "none")


def test_gpus_are_described_by_their_nvml_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        pass

    def by_index(index: int) -> str:
        if index > 7:
            raise NVMLError
        return f"GPU {index}"

    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=by_index,
        nvmlDeviceGetName=lambda handle: f"NVIDIA H100 ({handle})",
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    cards = vllm(tensor_parallel=2)
    assert describe_machine(cards, {"CUDA_VISIBLE_DEVICES": "3,4"}) == "2 x NVIDIA H100 (GPU 3)"
    assert describe_machine(cards, {"CUDA_VISIBLE_DEVICES": "9"}) == "2 x GPU"


def test_gpus_have_no_name_without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert describe_machine(vllm(tensor_parallel=2), {}) == "2 x GPU"
