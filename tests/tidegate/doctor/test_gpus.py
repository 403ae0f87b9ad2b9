"""The checks of GPUs, over sequences of what NVML reports."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from policy.wire.controller_reports import GpuReport
from serve.gpu_inventory import GpuInventory, inventory, read_inventory
from tests.serve.fake_nvml import FakeNvml, gpu
from tidegate.doctor import gpus
from tidegate.doctor.finding import Finding, Severity

GIB = 1024**3
HEALTHY: dict[str, Any] = {
    "used": GIB // 2, "total": 80 * GIB, "mhz": 1980, "max_mhz": 1980, "ecc": [0, 0], "rows": (0, 0, 0, 0),
    "lanes": 16, "max_lanes": 16, "persistent": 1,
}  # fmt: skip


def machine(*changes: dict[str, Any], **wiring: Any) -> GpuInventory:
    """A GPU for each of the changes of a healthy one."""
    return inventory(FakeNvml(*(gpu(**(HEALTHY | each)) for each in changes), **wiring))


def test_a_healthy_machine_is_described() -> None:
    found = machine({}, {})
    results = [
        gpus.driver(found, present=True, wanted=True, torch_cuda=(12, 8)),
        gpus.cards(found, running=False),
        gpus.memory_errors(found),
        gpus.clocks(found),
        gpus.topology(found, 2),
        gpus.pcie(found),
        gpus.persistence(found),
    ]
    assert [(each.level, each.advice) for each in results] == [(Severity.OK, "")] * len(results)
    assert [each.found for each in results] == [
        "580.95.05, for CUDA 13.0",
        "1 x NVIDIA H100 (GPU 0), 80 GiB each, 1 x NVIDIA H100 (GPU 1), 80 GiB each",
        "no uncorrected error since the driver was loaded",
        "not throttled, 1980 to 1980 MHz now",
        "1 pair by NVLink",
        "16",
        "on",
    ]


@pytest.mark.parametrize(
    ("present", "wanted", "level"),
    [(True, False, Severity.ERROR), (False, True, Severity.ERROR), (False, False, Severity.NOT_APPLICABLE)],
)
@pytest.mark.parametrize("missing", ["library", "driver"])
def test_without_nvml_it_depends_on_the_machine_and_the_deployment(
    present: bool, wanted: bool, level: Severity, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = FakeNvml()
    nvml.driver = False
    monkeypatch.setitem(sys.modules, "pynvml", None if missing == "library" else nvml)
    found = gpus.driver(read_inventory(), present=present, wanted=wanted, torch_cuda=None)
    assert found.level is level
    assert {"library": "nvidia-ml-py is not installed", "driver": "Driver Not Loaded"}[missing] in found.found


def test_a_driver_that_is_too_old_for_torch_is_an_error() -> None:
    found = gpus.driver(machine({}), present=True, wanted=False, torch_cuda=(14, 0))
    assert (found.level, found.advice) == (Severity.ERROR, "install a newer driver")


@pytest.mark.parametrize(
    ("check", "changes", "level", "text"),
    [
        (gpus.memory_errors, [{}, {"ecc": [9, 2]}], Severity.ERROR, "GPU 1: 2 uncorrected ECC errors"),
        (gpus.memory_errors, [{"rows": (0, 1, 0, 1)}], Severity.ERROR,
            "GPU 0: no spare memory rows are left"),
        (gpus.memory_errors, [{"rows": (0, 1, 1, 0)}] * 2, Severity.WARNING, "GPUs 0, 1: a row waits"),
        (gpus.clocks, [{"why": 4}], Severity.OK, "1980 to 1980 MHz now; GPU 0: power cap"),
        (gpus.clocks, [{}, {"why": 0x80, "mhz": 345}], Severity.WARNING,
         "GPU 1: hardware power brake, 345 of 1980 MHz, 60 C"),
        (gpus.pcie, [{"lanes": 8}, {}], Severity.WARNING, "GPU 0: 8 of 16"),
        (gpus.persistence, [{"persistent": 0}], Severity.WARNING, "GPU 0: off"),
    ],
)  # fmt: skip
def test_faults_name_their_gpus(
    check: Any, changes: list[dict[str, Any]], level: Severity, text: str
) -> None:
    found = check(machine(*changes))
    assert found.level is level
    assert text in found.found
    assert bool(found.advice) == (level is not Severity.OK)


def test_heat_is_a_warning_while_it_lasts() -> None:
    nvml, later = FakeNvml.playing("heat")
    levels = [gpus.clocks(inventory(nvml)).level]
    for moment in later:
        nvml.move(moment)
        levels.append(gpus.clocks(inventory(nvml)).level)
    assert levels == [Severity.OK, Severity.OK, Severity.WARNING, Severity.OK]


def test_a_lost_gpu_reports_nothing_else() -> None:
    nvml, later = FakeNvml.playing("lost")
    nvml.move(later[0])
    assert gpus.memory_errors(inventory(nvml)).level is Severity.OK
    nvml.move(later[1])
    assert gpus.memory_errors(inventory(nvml)).level is Severity.ERROR
    nvml.move(later[2])
    found = inventory(nvml)
    assert [
        check(found).level for check in (gpus.memory_errors, gpus.clocks, gpus.pcie, gpus.persistence)
    ] == [Severity.NOT_APPLICABLE] * 4


def test_memory_of_other_processes_is_a_warning_unless_a_deployment_runs() -> None:
    found = machine({"used": 70 * GIB}, {})
    assert gpus.cards(found, running=True).level is Severity.OK
    other = gpus.cards(found, running=False)
    assert (other.level, "GPU 0: 70.0 GiB" in other.found) == (Severity.WARNING, True)
    assert gpus.cards(machine(), running=False).level is Severity.WARNING


@pytest.mark.parametrize(
    ("linked", "ancestor", "gpus_per_replica", "level", "text"),
    [
        (True, 50, 3, Severity.OK, "3 pairs by NVLink"),
        (False, 50, 1, Severity.OK, "3 pairs by different NUMA nodes"),
        (False, 10, 2, Severity.WARNING, "3 pairs by one PCIe switch; the largest replica has 2 GPUs"),
        (False, 60, 1, Severity.OK, "3 pairs by an unknown path"),
    ],
)
def test_replicas_of_several_gpus_want_nvlink(
    linked: bool, ancestor: int, gpus_per_replica: int, level: Severity, text: str
) -> None:
    found = gpus.topology(machine({}, {}, {}, linked=linked, ancestor=ancestor), gpus_per_replica)
    assert (found.level, found.found) == (level, text)


def test_one_gpu_has_no_topology() -> None:
    assert gpus.topology(machine({}), 1).level is Severity.NOT_APPLICABLE


@pytest.mark.parametrize(
    ("reports", "level", "text"),
    [
        (None, Severity.NOT_APPLICABLE, "no deployment runs"),
        ({}, Severity.NOT_APPLICABLE, "no replica reports GPUs"),
        ({"a": GpuReport(watts=300.0), "b": GpuReport(watts=200.0, xid=31)}, Severity.OK, "2 report, 500 W"),
        ({"a": GpuReport(watts=0.0, xid=79, card="GPU 3")}, Severity.ERROR, "a: XID 79 on GPU 3"),
        ({"a": GpuReport(watts=1.0, ecc_uncorrected=2)}, Severity.ERROR, "a: 2 uncorrected ECC errors"),
        ({"a": GpuReport(watts=1.0, reasons=0x48, throttled="heat")}, Severity.WARNING, "a: heat"),
        ({"a": GpuReport(watts=1.0, reasons=0x4, throttled="cap")}, Severity.OK, "1 report, 1 W"),
    ],
)
def test_what_replicas_report(reports: dict[str, GpuReport] | None, level: Severity, text: str) -> None:
    found: Finding = gpus.replicas(reports)
    assert found.level is level
    assert text in found.found
