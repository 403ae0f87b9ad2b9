"""The NVIDIA driver and the GPUs of this machine, and how these are connected, read through NVML."""

from __future__ import annotations

from functools import partial
from itertools import combinations
from typing import Any

import msgspec

from serve import nvml as library

# How far apart two GPUs are, the nearest first; by NVML's topology level.
NVLINK = "NVLink"
_LEVELS = {
    0: "one board",
    10: "one PCIe switch",
    20: "several PCIe switches",
    30: "a PCIe host bridge",
    40: "one NUMA node",
    50: "different NUMA nodes",
}


class GpuLink(msgspec.Struct, frozen=True, kw_only=True):
    """How the GPUs with the indices ``first`` and ``second`` are connected: ``NVLink``, or through what."""

    first: int
    second: int
    through: str


class GpuCard(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU now; ``None`` is what it does not report.

    ``reasons`` are NVML's clock-throttle reasons as bits, ``memory_*`` bytes, ``ecc_uncorrected`` errors
    since the driver was loaded. With ``rows_pending`` memory rows are replaced at the next reset, with
    ``rows_failed`` there are no spare ones. ``pcie_width`` are lanes in use, of ``pcie_width_max``.
    """

    name: str
    uuid: str = ""
    memory_used: int = 0
    memory_total: int = 0
    watts: float | None = None
    celsius: float | None = None
    clock_mhz: int | None = None
    clock_max_mhz: int | None = None
    reasons: int = 0
    ecc_uncorrected: int | None = None
    rows_pending: bool = False
    rows_failed: bool = False
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    persistent: bool | None = None


class GpuInventory(msgspec.Struct, frozen=True, kw_only=True):
    """The driver's version, the CUDA version up to which it runs programs, and the GPUs by index."""

    driver: str
    cuda: tuple[int, int]
    cards: tuple[GpuCard, ...] = ()
    links: tuple[GpuLink, ...] = ()


def read_inventory() -> GpuInventory | str:
    """The GPUs of this machine, or why NVML cannot read them. Blocks."""
    try:
        nvml = library.load_nvml()
    except library.NvmlMissing as error:
        return str(error)
    try:
        return inventory(nvml)
    except nvml.NVMLError as error:
        return str(error)


def inventory(nvml: Any) -> GpuInventory:
    """The GPUs that ``nvml`` knows; raises its ``NVMLError`` if the driver ends meanwhile."""
    cuda = int(nvml.nvmlSystemGetCudaDriverVersion())
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(int(nvml.nvmlDeviceGetCount()))]
    return GpuInventory(
        driver=str(nvml.nvmlSystemGetDriverVersion()),
        cuda=(cuda // 1000, cuda % 1000 // 10),
        cards=tuple(_card(nvml, handle) for handle in handles),
        links=tuple(
            GpuLink(first=i, second=j, through=_through(nvml, handles[i], handles[j]))
            for i, j in combinations(range(len(handles)), 2)
        ),
    )


def _card(nvml: Any, handle: Any) -> GpuCard:
    ask = partial(library.ask, nvml, handle)
    memory = ask(nvml.nvmlDeviceGetMemoryInfo)
    milliwatts = ask(nvml.nvmlDeviceGetPowerUsage)
    rows = ask(nvml.nvmlDeviceGetRemappedRows) or (0, 0, 0, 0)
    persistent = ask(nvml.nvmlDeviceGetPersistenceMode)
    return GpuCard(
        name=str(ask(nvml.nvmlDeviceGetName) or "GPU"),
        uuid=str(ask(nvml.nvmlDeviceGetUUID) or ""),
        memory_used=0 if memory is None else int(memory.used),
        memory_total=0 if memory is None else int(memory.total),
        watts=None if milliwatts is None else milliwatts / 1e3,
        celsius=ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
        clock_mhz=ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
        clock_max_mhz=ask(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_SM),
        reasons=ask(nvml.nvmlDeviceGetCurrentClocksEventReasons) or 0,
        ecc_uncorrected=ask(
            nvml.nvmlDeviceGetTotalEccErrors,
            nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            nvml.NVML_VOLATILE_ECC,
        ),
        rows_pending=bool(rows[2]),
        rows_failed=bool(rows[3]),
        pcie_width=ask(nvml.nvmlDeviceGetCurrPcieLinkWidth),
        pcie_width_max=ask(nvml.nvmlDeviceGetMaxPcieLinkWidth),
        persistent=None if persistent is None else bool(persistent),
    )


def _through(nvml: Any, one: Any, other: Any) -> str:
    try:
        if (
            nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
            == nvml.NVML_P2P_STATUS_OK
        ):
            return NVLINK
        return _LEVELS.get(nvml.nvmlDeviceGetTopologyCommonAncestor(one, other), "an unknown path")
    except nvml.NVMLError:
        return "an unknown path"
