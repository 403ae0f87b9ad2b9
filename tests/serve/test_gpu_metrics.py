"""GPU metrics over a fake NVML: power, clocks, counters, throttle reasons, errors, what is unsupported."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import pytest

from policy.types import EngineKind
from policy.wire.controller_reports import GpuReport
from serve.engine.engine_server import describe_machine
from serve.gpu_metrics import GpuSet, devices, watch
from tests.serve.fake_nvml import FakeNvml, gpu
from tests.serve.sim_driver import spec


def report_of(gpu_set: GpuSet) -> GpuReport:
    report = gpu_set.read()
    assert report is not None
    return report


def test_metrics_are_summed_over_gpus() -> None:
    nvml = FakeNvml(gpu(), gpu(mw=150_500, mj=1_000, c=71, why=0x4), gpu(mw=999_000))
    assert GpuSet(nvml, ("0", "GPU-1")).read() == GpuReport(
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
    # A GPU that fell off the bus reports nothing else; what it had counted stays.
    for each in nvml.gpus:
        each.clear()
    assert gpu_set.read() == GpuReport(watts=0.0, joules=10_000.0, xid=79, card="GPU-1")


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
    assert GpuSet(FakeNvml({"mw": 70_000}), ("0",)).read() == GpuReport(watts=70.0)
    assert GpuSet(FakeNvml({"c": 50}), ("0",)).read() is None


def test_heat_lowers_the_clock_until_it_has_passed() -> None:
    nvml, later = FakeNvml.playing("heat")
    gpu_set = GpuSet(nvml, ("0",))
    seen = [report_of(gpu_set)]
    for moment in later:
        nvml.move(moment)
        seen.append(report_of(gpu_set))
    assert [(each.clock_mhz, each.celsius, each.reasons) for each in seen] == [
        (1980, 41.0, 0), (1755, 78.0, 4), (1140, 89.0, 72), (1965, 71.0, 0),
    ]  # fmt: skip
    assert seen[-1].clock_max_mhz == 1980
    assert (seen[-1].memory_used, seen[-1].memory_total) == (73_014_444_032, 85_520_809_984)
    # Bytes over PCIe, KiB over NVLink; errors of NVLink are replays and recoveries here.
    assert (seen[-1].pcie_tx, seen[-1].pcie_rx, seen[-1].pcie_replays) == (5 * 10**9, 9 * 10**9, 2)
    assert (seen[-1].nvlink_tx, seen[-1].nvlink_rx, seen[-1].nvlink_errors) == (7 * 2**30, 6 * 2**30, 4)


def test_memory_errors_precede_a_lost_gpu() -> None:
    nvml, later = FakeNvml.playing("lost")
    gpu_set = GpuSet(nvml, ("0",))
    assert report_of(gpu_set).xid == 0
    seen = []
    for moment in later:
        nvml.move(moment)
        seen.append(report_of(gpu_set))
    assert [(each.xid, each.ecc_corrected, each.ecc_uncorrected) for each in seen] == [
        (63, 3, 0), (94, 3, 1), (79, 3, 1),
    ]  # fmt: skip


def test_counts_are_summed_over_gpus_and_the_slowest_clock_counts() -> None:
    one = gpu(mhz=1980, max_mhz=1980, used=10, total=80, ecc=[1, 2], fields={"197": 5, "94": 1})
    two = gpu(mhz=1200, max_mhz=1755, used=20, total=80, ecc=[3, 4], fields={"197": 6})
    seen = report_of(GpuSet(FakeNvml(one, two, gpu()), ("0", "1", "2")))
    assert (seen.clock_mhz, seen.clock_max_mhz, seen.memory_used, seen.memory_total) == (1200, 1755, 30, 160)
    assert (seen.ecc_corrected, seen.ecc_uncorrected, seen.pcie_tx, seen.pcie_replays) == (4, 6, 11, 1)


@pytest.mark.parametrize("lost", ["mj", "ecc", "fields"])
def test_counters_do_not_fall_when_a_gpu_fails_to_answer_once(lost: str) -> None:
    nvml = FakeNvml(*(gpu(ecc=[1, 2], fields={"94": 3, "138": 4}) for _ in range(2)))
    gpu_set = GpuSet(nvml, ("0", "1"))
    before = gpu_set.read()
    answer = nvml.gpus[1].pop(lost)
    assert gpu_set.read() == before
    nvml.gpus[1][lost] = answer
    assert gpu_set.read() == before


def test_a_counter_that_one_of_several_fields_lacks_once_does_not_fall() -> None:
    nvml = FakeNvml(gpu(fields={"94": 3, "138": 4}))
    gpu_set = GpuSet(nvml, ("0",))
    before = report_of(gpu_set)
    nvml.gpus[0]["fields"] = {"138": 5}
    read = report_of(gpu_set)
    assert (read.pcie_replays, read.nvlink_tx) == (before.pcie_replays, 5 * 1024)


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
    assert line.startswith("GPU metrics unavailable")


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
