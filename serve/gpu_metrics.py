"""Power, temperature, clocks, memory, traffic and errors of a replica's GPUs, read through NVML.

Without the library, its driver or a GPU there are no metrics; one log line says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import operator
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from policy.wire.controller_reports import GpuReport, is_of_card
from serve.nvml import NvmlMissing, ask, gpu_handle, load_nvml

log = logging.getLogger("tidegate.host")

POLL_S = 1.0
# Clocks-event reasons of throttling; NVML's others mean an idle GPU or a user's setting.
REASONS = {
    0x04: "software power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
# Fields that are counted over all NVLinks of a GPU.
_ALL_LINKS = 0xFFFFFFFF
_KIB = 1024


def devices(gpus: float, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The indices or UUIDs of the GPUs that an engine with this environment uses; a part of one is one."""
    gpus = math.ceil(gpus)
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    named = [str(i) for i in range(gpus)] if visible is None else visible.split(",")
    return tuple(name.strip() for name in named if name.strip())[:gpus]


def product_name(names: Sequence[str]) -> str:
    """The name of the first GPU, as all of a replica are alike; ``GPU`` if NVML does not know it. Blocks."""
    with contextlib.suppress(NvmlMissing, IndexError):
        nvml = load_nvml()
        with contextlib.suppress(nvml.NVMLError):
            return str(nvml.nvmlDeviceGetName(gpu_handle(nvml, names[0])))
    return "GPU"


class GpuSet:
    """The GPUs of one replica. Every method blocks."""

    def __init__(self, nvml: Any, names: Sequence[str]) -> None:
        """Raises the library's ``NVMLError`` for a GPU that does not exist."""
        self._nvml = nvml
        self._handles = [gpu_handle(nvml, name) for name in names]
        self._xid, self._card = 0, ""
        # The last answer of each GPU, by its position, to each question about a counter.
        self._counted: dict[tuple[int, str], int] = {}
        # One event set per GPU, because an event does not name its GPU.
        self._errors: dict[str, Any] = {}
        try:
            for name, handle in zip(names, self._handles, strict=True):
                errors = nvml.nvmlEventSetCreate()
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, errors)
                self._errors[f"GPU {name}" if name.isdigit() else name] = errors
        except nvml.NVMLError as error:
            log.info("NVML reports no errors of the GPUs: %s", error)

    def read(self) -> GpuReport | None:
        """The sum over the GPUs; ``None`` if none reports its power."""
        nvml = self._nvml
        milliwatts = self._ask(nvml.nvmlDeviceGetPowerUsage)
        millijoules = self._count("energy", nvml.nvmlDeviceGetTotalEnergyConsumption)
        celsius = self._ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU)
        reasons = self._ask(nvml.nvmlDeviceGetCurrentClocksEventReasons)
        clocks = self._ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM)
        fastest = self._ask(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_SM)
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo)
        counts = self._counts()
        self._note_errors()
        if not milliwatts and not self._xid:
            return None
        return GpuReport(
            watts=sum(milliwatts) / 1e3,
            joules=millijoules / 1e3,
            celsius=float(max(celsius, default=0)),
            throttled=", ".join(word for bit, word in REASONS.items() if any(r & bit for r in reasons)),
            reasons=functools.reduce(operator.or_, reasons, 0) & functools.reduce(operator.or_, REASONS),
            xid=self._xid,
            card=self._card,
            clock_mhz=min(clocks, default=0),
            clock_max_mhz=min(fastest, default=0),
            memory_used=sum(each.used for each in memory),
            memory_total=sum(each.total for each in memory),
            ecc_corrected=self._ecc_errors("corrected", nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            ecc_uncorrected=self._ecc_errors("uncorrected", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
            **counts,
        )

    def _ecc_errors(self, name: str, kind: int) -> int:
        nvml = self._nvml
        return self._count(name, nvml.nvmlDeviceGetTotalEccErrors, kind, nvml.NVML_VOLATILE_ECC)

    def _counts(self) -> dict[str, int]:
        """The counters of PCIe and NVLink, in one call a GPU; what a GPU does not count is left out."""
        nvml = self._nvml
        fields: dict[tuple[int, int], tuple[str, int]] = {
            (nvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, 0): ("pcie_tx", 1),
            (nvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES, 0): ("pcie_rx", 1),
            (nvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER, 0): ("pcie_replays", 1),
            (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _ALL_LINKS): ("nvlink_tx", _KIB),
            (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, _ALL_LINKS): ("nvlink_rx", _KIB),
            (nvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL, 0): ("nvlink_errors", 1),
            (nvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL, 0): ("nvlink_errors", 1),
            (nvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL, 0): ("nvlink_errors", 1),
        }
        for i, handle in enumerate(self._handles):
            values = ask(nvml, handle, nvml.nvmlDeviceGetFieldValues, list(fields)) or ()
            for (field, _), value in zip(fields, values, strict=False):
                if value.nvmlReturn == 0:
                    small = value.valueType == nvml.NVML_VALUE_TYPE_UNSIGNED_INT
                    self._counted[i, str(field)] = int(value.value.uiVal if small else value.value.ullVal)
        found: dict[str, int] = {}
        for (field, _), (name, unit) in fields.items():
            found[name] = found.get(name, 0) + unit * self._sum(str(field))
        return found

    def _count(self, name: str, question: Callable[..., Any], *more: Any) -> int:
        """The sum of a counter over the GPUs that support the question."""
        for i, handle in enumerate(self._handles):
            if (answer := ask(self._nvml, handle, question, *more)) is not None:
                self._counted[i, name] = int(answer)
        return self._sum(name)

    def _sum(self, name: str) -> int:
        """The sum of a counter. It would fall without a GPU that fails to answer, and jump when it does."""
        return sum(self._counted.get((i, name), 0) for i in range(len(self._handles)))

    def _ask(self, question: Callable[..., Any], *more: Any) -> list[Any]:
        """The answers of the GPUs that support the question."""
        answers = (ask(self._nvml, handle, question, *more) for handle in self._handles)
        return [answer for answer in answers if answer is not None]

    def _note_errors(self) -> None:
        """Take the newest error; the wait of 0 ms ends with NVML's time-out."""
        for card, errors in self._errors.items():
            with contextlib.suppress(self._nvml.NVMLError):
                while True:
                    xid = int(self._nvml.nvmlEventSetWait(errors, 0).eventData)
                    # An error of the hardware is not replaced by one of a program.
                    if is_of_card(xid) or not is_of_card(self._xid):
                        self._xid, self._card = xid, card


def discover(names: Sequence[str]) -> GpuSet | None:
    """The GPUs with these names; ``None``, after a log line, if NVML cannot read them. Blocks."""
    try:
        nvml = load_nvml()
    except NvmlMissing as error:
        log.warning("GPU metrics unavailable: %s", error)
        return None
    try:
        return GpuSet(nvml, names)
    except nvml.NVMLError as error:
        log.warning("GPU metrics unavailable: %s", error)
        return None


async def watch(names: Sequence[str]) -> AsyncIterator[GpuReport | None]:
    """A report every :data:`POLL_S`; ends at once without GPUs."""
    cards = await asyncio.to_thread(discover, names) if names else None
    while cards is not None:
        yield await asyncio.to_thread(cards.read)
        await asyncio.sleep(POLL_S)
