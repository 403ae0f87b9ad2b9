"""What the cards of a replica draw, how hot they are and why they are slow, through NVML.

Without the library, without its driver and without cards there are no figures, which is said once.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from policy.gpu_errors import is_of_card
from policy.wire.reports import PowerReport

log = logging.getLogger("tidegate.host")

POLL_S = 1.0
# Clocks-event reasons that cost speed; NVML's others say that a card is idle or was set so.
REASONS = {
    0x04: "software power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}


def devices(gpus: int, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The indices or UUIDs of the cards that an engine with this environment uses, at most ``gpus``."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    named = [str(i) for i in range(gpus)] if visible is None else visible.split(",")
    return tuple(name.strip() for name in named if name.strip())[:gpus]


class GpuSet:
    """The cards of one replica. Every method blocks."""

    def __init__(self, nvml: Any, names: Sequence[str]) -> None:
        """Raises the library's ``NVMLError`` where a card is not there."""
        self._nvml = nvml
        nvml.nvmlInit()
        self._handles = [
            nvml.nvmlDeviceGetHandleByIndex(int(name))
            if name.isdigit()
            else nvml.nvmlDeviceGetHandleByUUID(name)
            for name in names
        ]
        self._xid, self._card = 0, ""
        # A set for each card: so it is known whose error it is.
        self._errors: dict[str, Any] = {}
        try:
            for name, handle in zip(names, self._handles, strict=True):
                errors = nvml.nvmlEventSetCreate()
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, errors)
                self._errors[f"GPU {name}" if name.isdigit() else name] = errors
        except nvml.NVMLError as error:
            log.info("NVML tells no errors of the cards: %s", error)

    def read(self) -> PowerReport | None:
        """The cards together; ``None`` where none tells what it draws."""
        nvml = self._nvml
        milliwatts = self._ask(nvml.nvmlDeviceGetPowerUsage)
        millijoules = self._ask(nvml.nvmlDeviceGetTotalEnergyConsumption)
        celsius = self._ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU)
        reasons = self._ask(nvml.nvmlDeviceGetCurrentClocksEventReasons)
        self._note_errors()
        if not milliwatts and not self._xid:
            return None
        return PowerReport(
            watts=sum(milliwatts) / 1e3,
            joules=sum(millijoules) / 1e3,
            celsius=float(max(celsius, default=0)),
            throttled=", ".join(word for bit, word in REASONS.items() if any(r & bit for r in reasons)),
            reasons=functools.reduce(operator.or_, reasons, 0) & functools.reduce(operator.or_, REASONS),
            xid=self._xid,
            card=self._card,
        )

    def _ask(self, question: Callable[..., int], *more: Any) -> list[int]:
        """The answers of the cards that have one."""
        answers = []
        for handle in self._handles:
            try:
                answers.append(question(handle, *more))
            except self._nvml.NVMLError:
                continue
        return answers

    def _note_errors(self) -> None:
        """The newest of the errors that came since; the wait of 0 ms ends with NVML's time-out."""
        for card, errors in self._errors.items():
            with contextlib.suppress(self._nvml.NVMLError):
                while True:
                    xid = int(self._nvml.nvmlEventSetWait(errors, 0).eventData)
                    # What the card itself had is not forgotten for what a program does on it.
                    if is_of_card(xid) or not is_of_card(self._xid):
                        self._xid, self._card = xid, card


def discover(names: Sequence[str]) -> GpuSet | None:
    """The cards called so; ``None``, after a line in the log, where there is nobody to ask. Blocks."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        log.warning("no figures of power: nvidia-ml-py is not installed")
        return None
    try:
        return GpuSet(nvml, names)
    except nvml.NVMLError as error:
        log.warning("no figures of power: NVML says %s", error)
        return None


async def watch(names: Sequence[str], tell: Callable[[PowerReport | None], None]) -> None:
    """Tell what the cards are like every :data:`POLL_S`, until cancelled; returns where there are none."""
    cards = await asyncio.to_thread(discover, names) if names else None
    while cards is not None:
        tell(await asyncio.to_thread(cards.read))
        await asyncio.sleep(POLL_S)
