"""The result of a capacity plan: options, and power, failure, growth and purchases of the best one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from policy.config.deployment import ProviderPrice
from sim.planning.candidates import Basis
from sim.planning.demand import NetworkTraffic, WorkloadDemand
from sim.planning.fleet_size_search import OutageResult, SpilloverResult

# A month is a twelfth of 365.25 days.
WEEKS_PER_MONTH = 365.25 / 12 / 7


class DeviceNeed(NamedTuple):
    """``devices`` are needed at ``factor`` times today's load."""

    factor: float
    devices: float


class CapacityAddition(msgspec.Struct, frozen=True, kw_only=True):
    """``modules`` that serve from ``month`` on, when the load is ``factor`` times today's.

    They have to be ordered in ``order_month`` (negative: before today). ``devices`` is the total with them.
    """

    month: float
    order_month: float
    factor: float
    modules: int
    devices: float


def schedule(
    needs: Sequence[DeviceNeed], growth: float, module: int, lead_weeks: float
) -> list[CapacityAddition]:
    """The purchases while the load grows by ``growth`` a month, compounded, until the last of ``needs``.

    ``needs`` begin with today's, at a factor of 1, in ascending order of factor; between two of them the
    devices are interpolated linearly. The first addition is what is needed today.
    """

    def addition(month: float, factor: float, modules: int, owned: int) -> CapacityAddition:
        order_month, devices = month - lead_weeks / WEEKS_PER_MONTH, owned * module
        return CapacityAddition(
            month=month, order_month=order_month, factor=factor, modules=modules, devices=devices
        )

    owned = math.ceil(needs[0].devices / module)
    found = [addition(0.0, 1.0, owned, owned)]
    while owned < math.ceil(max(need.devices for need in needs) / module):
        factor = _outgrown(needs, owned * module)
        owned += 1
        found.append(addition(math.log(factor) / math.log1p(growth), factor, 1, owned))
    return found


def _outgrown(needs: Sequence[DeviceNeed], devices: int) -> float:
    """The load factor beyond which more than ``devices`` are needed."""
    for before, after in itertools.pairwise(needs):
        if after.devices > devices:
            part = (devices - before.devices) / (after.devices - before.devices)
            return before.factor + part * (after.factor - before.factor)
    raise ValueError(f"{devices} devices are never outgrown")


class PlanOption(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate: the fewest ``replicas`` that meet the SLO, ``None`` where no count does.

    ``devices`` are GPUs or cores of ``kind``; ``with_spare`` includes one more replica. ``cost_per_h`` is
    without the spare, where a price is known. ``basis`` says what the count rests on.
    """

    kind: str
    degree: int
    device: str
    mode: str = ""
    replicas: int | None = None
    devices: int | None = None
    with_spare: int | None = None
    attainment: float | None = None
    ttft_p95_s: float | None = None
    itl_p95_s: float | None = None
    cost_per_h: float | None = None
    basis: Basis
    source: str


class GrowthStep(msgspec.Struct, frozen=True, kw_only=True):
    """The best candidate at ``factor`` times the load; ``devices`` and ``peak_w`` include the spare."""

    factor: float
    replicas: int
    devices: float
    peak_w: float
    heat_btu_per_h: float
    cost_per_h: float | None


class CrashImpact(msgspec.Struct, frozen=True, kw_only=True):
    """A replica crashes at ``at_s``, in the busiest minute, and is back after ``away_s`` seconds.

    The outages are those of the fewest replicas without a crash (``none``), with one (``without_spare``), and
    of one more replica with a crash (``with_spare``).
    """

    at_s: float
    away_s: float
    none: OutageResult
    without_spare: OutageResult
    with_spare: OutageResult


class PowerEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Power of the devices with the spare and their share of the servers, in watts.

    ``mean_w`` is over the load; ``peak_w`` with every device busy, which sizes supply and cooling; the heat
    is that of ``peak_w``.
    """

    mean_w: float
    peak_w: float
    heat_btu_per_h: float
    kwh_per_day: float
    joules_per_token: float | None
    source: str


class SpilloverPlan(msgspec.Struct, frozen=True, kw_only=True):
    """``replicas`` owned, and a fallback provider for the rest; ``total_per_h`` needs both prices.

    Requests that the replicas keep meet the SLO with the concurrency limit of ``bought``.
    """

    replicas: int
    devices: float
    bought: SpilloverResult
    owned_per_h: float | None
    total_per_h: float | None


class CapacityPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan for ``load``: ``options`` with the best first; the other fields are about the best.

    Options are ordered by cost where ``by_cost``, otherwise by device count. Counts up to ``most`` were
    tried. ``basis`` says what each part rests on.
    """

    model: str
    load: str
    seed: int
    demand: WorkloadDemand
    attainment: float
    ttft_p95_s: float | None
    itl_p95_s: float | None
    options: list[PlanOption]
    by_cost: bool
    most: int
    failure: CrashImpact | None = None
    growth: list[GrowthStep] = []
    power: PowerEstimate | None = None
    schedule: list[CapacityAddition] = []
    spillover: list[SpilloverPlan] = []
    network: NetworkTraffic | None = None
    basis: dict[str, str] = {}


class CapacityPlanRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of a plan.

    ``growth`` are load factors in ascending order; ``prices`` the price per device-hour by kind;
    ``gpu_peak_w`` and ``core_peak_w`` the power of unknown kinds. ``monthly`` is the growth per month (0.1 is
    10 %); devices come in units of ``module`` after ``lead_weeks``. ``upstream`` is the price of spillover,
    ``most`` the largest count that is tried. ``described`` marks a load that is not a trace.
    """

    growth: Sequence[float] = (1.5, 2.0, 4.0)
    prices: Mapping[str, float] = {}
    gpu_peak_w: float = 700.0
    core_peak_w: float = 10.0
    monthly: float | None = None
    module: int = 8
    lead_weeks: float = 8.0
    upstream: ProviderPrice | None = None
    most: int = 1024
    described: bool = False
