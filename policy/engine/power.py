"""Power of GPUs and CPUs: watts by utilisation, heat and joules per token, where no counter measures them."""

from __future__ import annotations

import msgspec

# 1 W for an hour is 3.412142 BTU (IT): all that is drawn leaves as heat.
BTU_PER_WH = 3.412142
# Idle power as a fraction of the peak, for unknown devices.
_IDLE_SHARE = 0.15


class PowerModel(msgspec.Struct, frozen=True, kw_only=True):
    """The power of one device, in watts, assumed from ``source``.

    ``idle_w`` with a loaded model and no work, ``peak_w`` under constant load, ``host_w`` its part of the
    server (processors, memory, network, fans). Measurements are better
    (:class:`policy.wire.controller_reports.GpuReport`).
    """

    idle_w: float
    peak_w: float
    host_w: float
    source: str

    def watts(self, busy: float) -> float:
        """Power of a device and its part of the server at utilisation ``busy`` (0..1): linear.

        Too high where most steps decode: they wait for memory (Patel et al., POLCA, 2023).
        """
        return self.idle_w + (self.peak_w - self.idle_w) * busy + self.host_w


def _of_server(name: str, idle_w: float, peak_w: float, server_w: float, devices: int) -> PowerModel:
    """A device in a server with ``devices`` of them and a maximum of ``server_w``."""
    return PowerModel(
        idle_w=idle_w,
        peak_w=peak_w,
        host_w=server_w / devices - peak_w,
        source=(
            f"data sheets: {peak_w:g} W a card, {server_w:g} W a {name} of {devices}; "
            f"{idle_w:g} W idle assumed"
        ),
    )


DRAWS: dict[str, PowerModel] = {
    "h100": _of_server("DGX H100", 100.0, 700.0, 10_200.0, 8),
    "h200": _of_server("DGX H200", 100.0, 700.0, 10_200.0, 8),
    "a100": _of_server("DGX A100", 80.0, 400.0, 6500.0, 8),
    "l4": PowerModel(
        idle_w=16.0,
        peak_w=72.0,
        host_w=60.0,
        source="data sheet: 72 W a card; 16 W idle and 60 W of the server beside each card assumed",
    ),
    "cpu": PowerModel(
        idle_w=3.0,
        peak_w=10.0,
        host_w=2.0,
        source="10 W a busy core as a budget has it; 3 W idle and 2 W beside it assumed",
    ),
}


def power_model_of(kind: str, peak_w: float) -> PowerModel:
    """The power of one device of ``kind``; an unknown kind has the maximum ``peak_w``."""
    known = DRAWS.get(kind)
    if known is not None:
        return known
    return PowerModel(
        idle_w=_IDLE_SHARE * peak_w,
        peak_w=peak_w,
        host_w=0.0,
        source=f"{peak_w:g} W a device as the budget has it; {_IDLE_SHARE:.0%} of it idle assumed",
    )


def btu_per_h(watts: float) -> float:
    """The heat of a power draw, in BTU per hour."""
    return watts * BTU_PER_WH
