"""GPU metrics over a fake NVML: power, throttle reasons, errors, and unsupported metrics."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from policy.types import EngineKind
from policy.wire.reports import PowerReport
from serve.engine.main import describe_machine
from serve.gpu_metrics import GpuSet, devices, watch
from tests.serve.sim_driver import spec


class FakeNvml:
    """NVML with some GPUs, by index and UUID: milliwatts, millijoules, degrees and reasons of each."""

    NVML_TEMPERATURE_GPU = 0
    nvmlEventTypeXidCriticalError = 8

    class NVMLError(Exception):
        """What each call raises that fails."""

    def __init__(self, *gpus: dict[str, int]) -> None:
        self.gpus = list(gpus)
        self.errors: dict[int, list[int]] = {}
        self.told_of: list[int] = []
        self.driver = True

    def nvmlInit(self) -> None:
        if not self.driver:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index >= len(self.gpus):
            raise self.NVMLError("Invalid Argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return int(uuid.removeprefix("GPU-"))

    def nvmlDeviceGetName(self, handle: int) -> str:
        return f"NVIDIA H100 (GPU {handle})"

    def _of(self, handle: int, figure: str) -> int:
        if figure not in self.gpus[handle]:
            raise self.NVMLError("Not Supported")
        return self.gpus[handle][figure]

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return self._of(handle, "mw")

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        return self._of(handle, "mj")

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        assert sensor == self.NVML_TEMPERATURE_GPU
        return self._of(handle, "c")

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:
        return self._of(handle, "why")

    def nvmlEventSetCreate(self) -> list[int]:
        return []

    def nvmlDeviceRegisterEvents(self, handle: int, kinds: int, events: list[int]) -> None:
        assert kinds == 8
        events.append(handle)
        self.told_of.append(handle)

    def nvmlEventSetWait(self, events: list[int], timeout_ms: int) -> Any:
        assert timeout_ms == 0
        (handle,) = events
        if not self.errors.get(handle):
            raise self.NVMLError("Timeout")
        return SimpleNamespace(eventData=self.errors[handle].pop(0))


def gpu(mw: int = 300_000, mj: int = 5_000_000, c: int = 60, why: int = 0) -> dict[str, int]:
    return {"mw": mw, "mj": mj, "c": c, "why": why}


def report_of(gpu_set: GpuSet) -> PowerReport:
    report = gpu_set.read()
    assert report is not None
    return report


def test_metrics_are_summed_over_gpus() -> None:
    nvml = FakeNvml(gpu(), gpu(mw=150_500, mj=1_000, c=71, why=0x4), gpu(mw=999_000))
    assert GpuSet(nvml, ("0", "GPU-1")).read() == PowerReport(
        watts=450.5, joules=5001.0, celsius=71.0, throttled="software power cap", reasons=0x4
    )
    assert nvml.told_of == [0, 1]


def test_only_throttle_reasons_are_named() -> None:
    nvml = FakeNvml(gpu(why=0x1 | 0x2 | 0x10 | 0x100))
    gpu_set = GpuSet(nvml, ("0",))
    read = report_of(gpu_set)
    assert (read.throttled, read.reasons) == ("", 0)
    nvml.gpus[0]["why"] = 0x8 | 0x40
    read = report_of(gpu_set)
    assert (read.throttled, read.reasons) == ("hardware slowdown, hardware thermal slowdown", 0x48)


def test_the_last_gpu_error_and_its_gpu_are_kept() -> None:
    nvml = FakeNvml(gpu(), gpu())
    gpu_set = GpuSet(nvml, ("0", "GPU-1"))
    nvml.errors = {0: [31], 1: [48, 79]}
    for _ in range(2):
        read = report_of(gpu_set)
        assert (read.xid, read.card) == (79, "GPU-1")
    # A program error on another GPU does not replace it.
    nvml.errors = {0: [45, 13]}
    assert report_of(gpu_set).xid == 79
    # A GPU that fell off the bus reports nothing else.
    for each in nvml.gpus:
        each.clear()
    assert gpu_set.read() == PowerReport(watts=0.0, xid=79, card="GPU-1")


def test_a_program_error_is_replaced_by_a_gpu_error() -> None:
    nvml = FakeNvml(gpu(), gpu())
    gpu_set = GpuSet(nvml, ("0", "1"))
    for errors, expected in (
        ({0: [31]}, (31, "GPU 0")),
        ({1: [43]}, (43, "GPU 1")),
        ({0: [94]}, (94, "GPU 0")),
    ):
        nvml.errors = errors
        read = report_of(gpu_set)
        assert (read.xid, read.card) == expected


def test_unsupported_metrics_are_left_out() -> None:
    assert GpuSet(FakeNvml({"mw": 70_000}), ("0",)).read() == PowerReport(watts=70.0)
    assert GpuSet(FakeNvml({"c": 50}), ("0",)).read() is None


def test_metrics_are_read_without_event_support(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(gpu())

    def refuse(*_: Any) -> None:
        raise FakeNvml.NVMLError("Not Supported")

    monkeypatch.setattr(nvml, "nvmlDeviceRegisterEvents", refuse)
    read = report_of(GpuSet(nvml, ("0",)))
    assert (read.watts, read.xid) == (300.0, 0)


@pytest.mark.parametrize(
    ("gpus", "environment", "names"),
    [
        (0, {}, ()),
        (2, {}, ("0", "1")),
        (2, {"CUDA_VISIBLE_DEVICES": "3, GPU-5,6"}, ("3", "GPU-5")),
        (1, {"CUDA_VISIBLE_DEVICES": ""}, ()),
        (0, {"CUDA_VISIBLE_DEVICES": "0,1"}, ()),
    ],
)
def test_a_replica_reads_its_own_gpus(gpus: int, environment: dict[str, str], names: tuple[str, ...]) -> None:
    assert devices(gpus, environment) == names


@pytest.mark.parametrize("missing", ["library", "driver", "gpu"])
async def test_without_nvml_there_are_no_metrics_and_one_log_line(
    missing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nvml = FakeNvml(*([] if missing == "gpu" else [gpu()]))
    nvml.driver = missing != "driver"
    monkeypatch.setitem(sys.modules, "pynvml", None if missing == "library" else nvml)
    assert [report async for report in watch(("0",))] == []
    (line,) = caplog.messages
    assert line.startswith("GPU power metrics unavailable")


async def test_a_shape_without_gpus_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert [report async for report in watch(())] == []
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("visible", "installed", "described"),
    [
        ("1,0", True, "2 x NVIDIA H100 (GPU 1)"),
        ("9", True, "2 x GPU"),
        ("", True, "2 x GPU"),
        ("0,1", False, "2 x GPU"),
    ],
)
def test_the_machine_description_names_the_first_visible_gpu(
    visible: str, installed: bool, described: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(gpu(), gpu()) if installed else None)
    on_gpus = msgspec.structs.replace(spec(), kind=EngineKind.VLLM, tensor_parallel=2)
    assert describe_machine(on_gpus, {"CUDA_VISIBLE_DEVICES": visible}) == described
