"""What a plan says: options, and what the best of them takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from policy.config.deployment import Price
from sim.planning.candidates import Basis
from sim.planning.demand import Demand
from sim.planning.network import Network
from sim.planning.purchase_schedule import Addition
from sim.planning.trial import Outage, OverflowResult


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate: the fewest ``replicas`` that meet the objective, ``None`` where no count does.

    ``devices`` are GPUs or cores of ``kind``; ``with_spare`` as many with a replica more. ``cost_per_h`` is
    theirs without it, where a price is known. ``basis`` is what the count rests on.
    """

    kind: str
    degree: int
    device: str
    replicas: int | None
    devices: int | None
    with_spare: int | None
    mode: str
    attainment: float | None
    ttft_p95_s: float | None
    itl_p95_s: float | None
    cost_per_h: float | None
    basis: Basis
    source: str


class GrowthStep(msgspec.Struct, frozen=True, kw_only=True):
    """The best candidate at ``factor`` times the load; ``devices`` and ``peak_w`` are with the spare."""

    factor: float
    replicas: int
    devices: int
    peak_w: float
    heat_btu_per_h: float
    cost_per_h: float | None


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A crash ``at_s``, in the busiest minute, of a replica that is back after ``away_s`` seconds.

    ``none`` is what the fewest replicas attain in that time if none of them crashes, ``without_spare`` if one
    does, ``with_spare`` if one of one more does.
    """

    at_s: float
    away_s: float
    none: Outage
    without_spare: Outage
    with_spare: Outage


class Power(msgspec.Struct, frozen=True, kw_only=True):
    """The devices with the spare and their part of the servers, in watts; the heat is that of ``peak_w``.

    ``mean_w`` is over the load as it came, ``peak_w`` with every device busy: what has to be fed and cooled.
    """

    mean_w: float
    peak_w: float
    heat_btu_per_h: float
    kwh_per_day: float
    joules_per_token: float | None
    source: str


class Overflow(msgspec.Struct, frozen=True, kw_only=True):
    """``replicas`` owned, and an upstream for the rest; ``total_per_h`` is known where both prices are.

    What the replicas keep is within the SLO with the bound of requests at once that ``bought`` has.
    """

    replicas: int
    devices: int
    bought: OverflowResult
    owned_per_h: float | None
    total_per_h: float | None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to have for ``load``, ``options`` the best first; the rest is about the first of them.

    They are in the order of cost where ``by_cost``, and of how many devices there are where not. No count
    above ``most`` was tried.
    ``basis`` says of each part what it rests on.
    """

    model: str
    load: str
    seed: int
    demand: Demand
    attainment: float
    ttft_p95_s: float | None
    itl_p95_s: float | None
    options: list[Option]
    by_cost: bool
    most: int
    failure: Failure | None
    growth: list[GrowthStep]
    power: Power | None
    schedule: list[Addition]
    overflow: list[Overflow]
    network: Network | None
    basis: dict[str, str]


class PlanRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan is asked for.

    ``growth`` are factors of the load, in their order, ``prices`` what a device of a kind costs in an hour,
    ``gpu_peak_w`` and ``core_peak_w`` what one of a kind that is not known draws. ``monthly`` is the growth
    in a month (0.1 is a tenth); devices come ``module`` at once after ``lead_weeks``. ``upstream`` is the
    price of overflow, ``most`` the largest count that is tried. A load that was
    ``described`` is no trace.
    """

    growth: Sequence[float] = (1.5, 2.0, 4.0)
    prices: Mapping[str, float] = {}
    gpu_peak_w: float = 700.0
    core_peak_w: float = 10.0
    monthly: float | None = None
    module: int = 8
    lead_weeks: float = 8.0
    upstream: Price | None = None
    most: int = 1024
    described: bool = False
