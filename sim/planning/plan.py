"""The capacity plan of a model: every candidate is tried on the load, and the best one is worked out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from policy.config.deployment import ProviderPrice
from policy.engine.power import btu_per_h, power_model_of
from sim.planning.candidates import Basis, ShapeCandidate, mode_of
from sim.planning.demand import network
from sim.planning.fleet_size_search import CRASH_AFTER_S, FleetRunResult, FleetRuns, fewest
from sim.planning.result import (
    CapacityPlan,
    CapacityPlanRequest,
    CrashImpact,
    DeviceNeed,
    GrowthStep,
    PlanOption,
    PowerEstimate,
    SpilloverPlan,
    schedule,
)

# Replicas beyond those that the load needs: one may fail at any time.
SPARE = 1
# The most rows of the spillover table.
_ROWS = 6
# Runs of a search for a count, or for a limit of requests at once, as they usually take.
_SEARCH_RUNS, _LIMIT_RUNS = 3, 6
# The fields that an option has from its candidate.
_SHARED = ("kind", "degree", "device", "basis", "source")


def fewest_of(trials: FleetRuns, candidate: ShapeCandidate, most: int, factor: float = 1.0) -> int | None:
    """The fewest replicas of ``candidate`` that meet the SLO at ``factor`` times the load."""
    if not trials.could(candidate):
        return None
    guess = trials.guess(candidate, factor)
    return fewest(lambda count: trials.meets(candidate, count, factor), guess, most)


def expected_runs(found: Sequence[ShapeCandidate], ask: CapacityPlanRequest) -> int:
    """About how many simulations a plan takes."""
    # Three of the best one with and without a failure.
    runs = _SEARCH_RUNS * (len(found) + len(ask.growth)) + 3
    return runs if ask.upstream is None else runs + _LIMIT_RUNS * (_ROWS - 2)


def plan(
    trials: FleetRuns, found: Sequence[ShapeCandidate], ask: CapacityPlanRequest, *, load: str, seed: int
) -> CapacityPlan:
    """Try every candidate in ``found`` and build the plan of the best one."""
    options = {each.name: _option(trials, each, ask) for each in found}
    # Rank by cost where all prices are known: devices of different kinds are not comparable by count.
    prices = [each.cost_per_h for each in options.values() if each.replicas is not None]
    by_cost = bool(prices) and None not in prices
    ranked = sorted(found, key=lambda each: _rank(options[each.name], by_cost))
    best = ranked[0]
    count = options[best.name].replicas
    slo = trials.spec.control.slo
    made = CapacityPlan(
        model=trials.spec.name,
        load=load,
        seed=seed,
        demand=trials.demand,
        options=[options[each.name] for each in ranked],
        by_cost=by_cost,
        attainment=slo.attainment,
        ttft_p95_s=slo.ttft_p95_s,
        itl_p95_s=slo.itl_p95_s,
        most=ask.most,
    )
    if count is None:
        return made
    growth = _growth(trials, best, count, ask)
    needs = [DeviceNeed(each.factor, each.devices) for each in growth]
    return msgspec.structs.replace(
        made,
        failure=_failure(trials, best, count),
        growth=growth,
        power=_power(best, count, trials.tried(best, count), ask),
        schedule=[] if ask.monthly is None else schedule(needs, ask.monthly, ask.module, ask.lead_weeks),
        spillover=[] if ask.upstream is None else _spillover(trials, best, count, ask.upstream, ask),
        network=network(trials.demand, trials.spec.name, count, trials.tried(best, count).streams),
        basis=_basis(best, ask),
    )


def _option(trials: FleetRuns, candidate: ShapeCandidate, ask: CapacityPlanRequest) -> PlanOption:
    count = fewest_of(trials, candidate, ask.most)
    option = PlanOption(**{name: getattr(candidate, name) for name in _SHARED})
    if count is None:
        return option
    result, price = trials.tried(candidate, count), ask.prices.get(candidate.kind)
    devices = count * candidate.degree
    return msgspec.structs.replace(
        option,
        replicas=count,
        devices=devices,
        with_spare=devices + SPARE * candidate.degree,
        mode=mode_of(count),
        attainment=result.attainment,
        ttft_p95_s=result.ttft_p95_s,
        itl_p95_s=result.itl_p95_s,
        cost_per_h=None if price is None else devices * price,
    )


def _rank(option: PlanOption, by_cost: bool) -> tuple[float, ...]:
    if option.devices is None or option.with_spare is None:
        return (math.inf,)
    paid = option.cost_per_h if by_cost and option.cost_per_h is not None else option.devices
    return (paid, option.devices, option.with_spare)


def _growth(trials: FleetRuns, best: ShapeCandidate, now: int, ask: CapacityPlanRequest) -> list[GrowthStep]:
    made = []
    for factor in (1.0, *ask.growth):
        count = now if factor == 1.0 else fewest_of(trials, best, ask.most, factor)
        if count is None:
            break
        devices = (count + SPARE) * best.degree
        peak_w = devices * power_model_of(best.kind, _peak_w(best, ask)).watts(1.0)
        price = ask.prices.get(best.kind)
        made.append(
            GrowthStep(
                factor=factor,
                replicas=count,
                devices=devices,
                peak_w=peak_w,
                heat_btu_per_h=btu_per_h(peak_w),
                cost_per_h=None if price is None else devices * price,
            )
        )
    return made


def _failure(trials: FleetRuns, best: ShapeCandidate, count: int) -> CrashImpact:
    return CrashImpact(
        at_s=trials.demand.busiest_s + CRASH_AFTER_S,
        away_s=trials.spec.control.assumed_start_s,
        none=trials.outage(best, count, crash=False),
        without_spare=trials.outage(best, count, crash=True),
        with_spare=trials.outage(best, count + SPARE, crash=True),
    )


def _power(best: ShapeCandidate, count: int, came: FleetRunResult, ask: CapacityPlanRequest) -> PowerEstimate:
    draw = power_model_of(best.kind, _peak_w(best, ask))
    devices = (count + SPARE) * best.degree
    # The same steps are spread over one replica more.
    mean_w = devices * draw.watts(came.busy * count / (count + SPARE))
    peak_w = devices * draw.watts(1.0)
    return PowerEstimate(
        mean_w=mean_w,
        peak_w=peak_w,
        heat_btu_per_h=btu_per_h(peak_w),
        kwh_per_day=mean_w * 24 / 1000,
        joules_per_token=mean_w / came.tokens_per_s if came.tokens_per_s > 0.0 else None,
        source=draw.source,
    )


def _peak_w(candidate: ShapeCandidate, ask: CapacityPlanRequest) -> float:
    return ask.gpu_peak_w if candidate.device == "gpu" else ask.core_peak_w


def _spillover(
    trials: FleetRuns, best: ShapeCandidate, count: int, price: ProviderPrice, ask: CapacityPlanRequest
) -> list[SpilloverPlan]:
    """From all the replicas that the load needs down to none, where the requests kept meet the SLO."""
    at_once = trials.tried(best, count).streams // count + 1
    rows = sorted({round(count * part / (_ROWS - 1)) for part in range(_ROWS)}, reverse=True)
    found = []
    for owned in rows:
        bought = trials.spillover(best, owned, price, at_once)
        if bought is None:
            continue
        each = ask.prices.get(best.kind)
        owned_per_h = None if each is None else owned * best.degree * each
        found.append(
            SpilloverPlan(
                replicas=owned,
                devices=owned * best.degree,
                bought=bought,
                owned_per_h=owned_per_h,
                total_per_h=None if owned_per_h is None else owned_per_h + bought.cost_per_h,
            )
        )
    return found


def _basis(best: ShapeCandidate, ask: CapacityPlanRequest) -> dict[str, str]:
    """What each part of a plan rests on; each text begins with the :class:`Basis`."""
    assumed = Basis.ASSUMED.value
    counted = f"{Basis.MEASURED.value}: counted in the requests that are replayed"
    return {
        "load": f"{assumed}: as described, with lengths that vary" if ask.described else counted,
        "counts": f"{best.basis.value}: the simulator, whose steps are timed by {best.source}",
        "growth": f"{assumed}: the same requests at a multiple of the rate",
        "failure": f"{assumed}: how long a start takes is control.assumed_start_s",
        "power": f"{assumed}: {power_model_of(best.kind, _peak_w(best, ask)).source}",
        "schedule": f"{assumed}: the growth as given, devices on a line between the loads above",
        "spillover": f"{best.basis.value}: what simulated replicas turn away when they are full",
        "prices": f"{assumed}: as given",
        "streams": f"{Basis.MEASURED.value}: bytes of an event of the engine's chat stream, in a packet each",
        "requests": f"{assumed}: 4 characters a token, 800 bytes of headers and JSON",
    }
