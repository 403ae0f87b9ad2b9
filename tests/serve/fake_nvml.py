"""NVML over sequences of answers: what a driver and its GPUs report, moment by moment."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SEQUENCES = Path(__file__).parent / "data" / "nvml_sequences.json"


class FakeNvml:
    """NVML with some GPUs, by index and UUID. Each is a dictionary of what it reports; the rest fails."""

    NVML_TEMPERATURE_GPU = 0
    NVML_CLOCK_SM = 1
    NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 1
    NVML_VOLATILE_ECC = 0
    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 2, 0
    NVML_VALUE_TYPE_UNSIGNED_INT = 1
    NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL = 38
    NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL = 52
    NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL = 59
    NVML_FI_DEV_PCIE_REPLAY_COUNTER = 94
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 138, 139
    NVML_FI_DEV_PCIE_COUNT_TX_BYTES, NVML_FI_DEV_PCIE_COUNT_RX_BYTES = 197, 198
    nvmlEventTypeXidCriticalError = 8

    class NVMLError(Exception):
        """What each call raises that fails."""

    def __init__(self, *gpus: dict[str, Any], linked: bool = True, ancestor: int = 50) -> None:
        """GPUs that are ``linked`` have NVLink; others meet at the topology level ``ancestor``."""
        self.gpus = list(gpus)
        self.linked, self.ancestor = linked, ancestor
        self.errors: dict[int, list[int]] = {}
        self.told_of: list[int] = []
        self.driver = True

    @classmethod
    def playing(cls, name: str) -> tuple[FakeNvml, list[dict[str, Any]]]:
        """One GPU, and the later moments of a sequence, for :meth:`move`."""
        first, *later = json.loads(SEQUENCES.read_text())[name]
        nvml = cls({})
        nvml.move(first)
        return nvml, later

    def move(self, moment: dict[str, Any]) -> None:
        """Report the changes of ``moment`` from now on; ``null`` is what is not reported any more."""
        changes = dict(moment)
        self.errors = {0: changes.pop("xids", [])}
        merged = {**self.gpus[0], **changes}
        self.gpus = [{key: value for key, value in merged.items() if value is not None}]

    def nvmlInit(self) -> None:
        if not self.driver:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.95.05"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13_000

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index >= len(self.gpus):
            raise self.NVMLError("Invalid Argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return int(uuid.removeprefix("GPU-"))

    def nvmlDeviceGetName(self, handle: int) -> str:
        return f"NVIDIA H100 (GPU {handle})"

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def _of(self, handle: int, figure: str) -> Any:
        if figure not in self.gpus[handle]:
            raise self.NVMLError("Not Supported")
        return self.gpus[handle][figure]

    def nvmlDeviceGetPowerUsage(self, handle: int) -> Any:
        return self._of(handle, "mw")

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> Any:
        return self._of(handle, "mj")

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> Any:
        assert sensor == self.NVML_TEMPERATURE_GPU
        return self._of(handle, "c")

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> Any:
        return self._of(handle, "why")

    def nvmlDeviceGetClockInfo(self, handle: int, clock: int) -> Any:
        assert clock == self.NVML_CLOCK_SM
        return self._of(handle, "mhz")

    def nvmlDeviceGetMaxClockInfo(self, handle: int, clock: int) -> Any:
        assert clock == self.NVML_CLOCK_SM
        return self._of(handle, "max_mhz")

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=self._of(handle, "used"), total=self._of(handle, "total"))

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> Any:
        assert counter == self.NVML_VOLATILE_ECC
        return self._of(handle, "ecc")[kind]

    def nvmlDeviceGetRemappedRows(self, handle: int) -> Any:
        return self._of(handle, "rows")

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: int) -> Any:
        return self._of(handle, "lanes")

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> Any:
        return self._of(handle, "max_lanes")

    def nvmlDeviceGetPersistenceMode(self, handle: int) -> Any:
        return self._of(handle, "persistent")

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, index: int) -> int:
        assert one != other
        assert index == self.NVML_P2P_CAPS_INDEX_NVLINK
        return 0 if self.linked else 5

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:
        assert one != other
        return self.ancestor

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[tuple[int, int]]) -> list[Any]:
        """32-bit values in the lower half of a union whose upper half is not defined."""
        counts = self._of(handle, "fields")
        found = []
        for field, scope in fields:
            # NVML adds the links up in this scope.
            assert scope == (0xFFFFFFFF if field in (138, 139) else 0)
            wide = field in (138, 139, 197, 198)
            number = counts.get(str(field), 0)
            value = SimpleNamespace(uiVal=number, ullVal=number if wide else number | 7 << 32)
            kind = 3 if wide else self.NVML_VALUE_TYPE_UNSIGNED_INT
            found.append(
                SimpleNamespace(nvmlReturn=0 if str(field) in counts else 3, valueType=kind, value=value)
            )
        return found

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


def gpu(mw: int = 300_000, mj: int = 5_000_000, c: int = 60, why: int = 0, **more: Any) -> dict[str, Any]:
    """A GPU that reports these, and ``more``."""
    return {"mw": mw, "mj": mj, "c": c, "why": why, **more}
