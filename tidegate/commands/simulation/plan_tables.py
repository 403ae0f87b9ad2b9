"""A capacity plan as text: its assumptions, and tables of the options, the best one, growth and bases."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from policy.config.control import SloConfig
from policy.config.deployment import ModelSpec
from sim.planning.candidates import ShapeCandidate
from sim.planning.demand import WorkloadDemand
from sim.planning.plan import SPARE
from sim.planning.result import CapacityAddition, CapacityPlan, CapacityPlanRequest, PlanOption
from tidegate.commands.terminal import table, table_of_rows
from tidegate.commands.units import latency, optional, plural

_COST = "{:.2f}".format


def assumptions(spec: ModelSpec, found: Sequence[ShapeCandidate], ask: CapacityPlanRequest) -> Iterator[str]:
    """What a plan rests on, to be read before it is made."""
    kinds: dict[str, list[ShapeCandidate]] = {}
    for candidate in found:
        kinds.setdefault(candidate.kind, []).append(candidate)
    for kind, candidates in kinds.items():
        degrees = ", ".join(str(each.degree) for each in candidates)
        price = ask.prices.get(kind)
        cost = "" if price is None else f"; {price:g} per hour"
        first = candidates[0]
        yield f"{kind}: {degrees} per replica; step times {first.basis}: {first.source}{cost}"
    start_s = spec.control.assumed_start_s
    factors = ", ".join(f"{factor:g}" for factor in (1.0, *ask.growth))
    yield f"Load x {factors}; {SPARE} spare; a failed replica is back after {start_s:g} s (assumed_start_s)"


def tables(plan: CapacityPlan) -> Iterator[Table | Text]:
    """The parts of ``plan`` in reading order, after its load and assumptions."""
    yield _options(plan)
    best = plan.options[0]
    if best.replicas is None:
        yield Text(f"No replica count up to {plan.most} of any GPU type meets the SLO.")
        return
    yield _best(plan, best)
    yield _growth(plan)
    if plan.schedule:
        yield _schedule(plan)
    if plan.spillover:
        yield _spillover(plan)
    yield table_of_rows(("number", "basis"), plan.basis.items(), title="Basis of the numbers")


def describe_load(model: str, load: str, seed: int, demand: WorkloadDemand, slo: SloConfig) -> str:
    """The load in numbers, and the SLO."""
    limits = [
        f"{name} p95 {latency(seconds)}"
        for name, seconds in (("TTFT", slo.ttft_p95_s), ("ITL", slo.itl_p95_s))
        if seconds is not None
    ]
    return (
        f"{model}, {load}, seed {seed}: {demand.requests} requests in {demand.lasts_s:.0f} s, "
        f"peak minute {demand.peak_rps:.2f}/s; mean {demand.input_tokens:.0f} input and "
        f"{demand.output_tokens:.0f} output tokens\n"
        f"SLO: {' and '.join(limits)} for {slo.attainment:.1%} of requests"
    )


def _options(plan: CapacityPlan) -> Table:
    return table(
        plan.options,
        ("GPU type", lambda option: option.kind),
        ("per replica", lambda option: plural(option.degree, option.device)),
        ("mode", lambda option: option.mode or f"none up to {plan.most} replicas"),
        ("basis", lambda option: option.basis.value),
        (">replicas", lambda option: option.replicas),
        (">GPUs", lambda option: option.devices),
        (">with a spare", lambda option: option.with_spare),
        (">attainment", lambda option: optional(option.attainment, "{:.2%}".format)),
        (">TTFT p95", lambda option: optional(option.ttft_p95_s, latency)),
        (">ITL p95", lambda option: optional(option.itl_p95_s, lambda itl_s: f"{1e3 * itl_s:.1f} ms")),
        (">cost/h", lambda option: optional(option.cost_per_h, _COST)),
        title=f"Fewest GPUs of each type, best first by {'cost' if plan.by_cost else 'number of GPUs'}",
    )


def _best(plan: CapacityPlan, best: PlanOption) -> Table:
    failure, power, network = plan.failure, plan.power, plan.network
    assert failure is not None and power is not None and network is not None
    needs = [
        (
            f"busiest {failure.away_s:g} s",
            f"{failure.none.attainment:.2%} within the SLO without a failure and without the spare",
            "counts",
        ),
        (
            "  one replica crashes",
            f"{failure.with_spare.attainment:.2%} with the spare, {failure.without_spare.attainment:.2%} "
            f"without; {failure.with_spare.cut} streams cut",
            "failure",
        ),
        ("power", f"mean {power.mean_w / 1000:.2f} kW, max {power.peak_w / 1000:.2f} kW", "power"),
        ("heat", f"max {power.heat_btu_per_h:.0f} BTU/h", "power"),
        ("energy", f"{power.kwh_per_day:.1f} kWh/day", "power"),
        ("gateway network", f"{_mbit(network.each_way)} in each direction", "requests"),
        ("  requests", f"{_mbit(network.requests)}, {_mbit(network.replica_in)} per replica", "requests"),
        (
            "  streams",
            f"{_mbit(network.streams)} in {network.events_per_s:.0f} events/s, "
            f"{_mbit(network.replica_out)} per replica",
            "streams",
        ),
        ("concurrent requests", f"{network.streams_open}, each with a connection on both sides", "counts"),
    ]
    if power.joules_per_token is not None:
        needs.insert(5, ("", f"{power.joules_per_token:.2f} J per input or output token", "power"))
    replicas = plural(best.replicas or 0, "replica")
    return table(
        needs,
        ("resource", lambda need: need[0]),
        ("need", lambda need: need[1]),
        ("basis", lambda need: _basis_word(plan, need[2])),
        title=f"{replicas} with {best.degree} x {best.kind} each, and {SPARE} spare",
    )


def _growth(plan: CapacityPlan) -> Table:
    return table(
        plan.growth,
        ("load", lambda growth: f"x {growth.factor:g}"),
        ("basis", lambda _: _basis_word(plan, "growth")),
        (">replicas", lambda growth: f"{growth.replicas} + {SPARE}"),
        (">GPUs", lambda growth: growth.devices),
        (">max power", lambda growth: f"{growth.peak_w / 1000:.2f} kW"),
        (">max heat", lambda growth: f"{growth.heat_btu_per_h:.0f} BTU/h"),
        (">cost/h", lambda growth: optional(growth.cost_per_h, _COST)),
        title="As the load grows, with the spare",
    )


def _schedule(plan: CapacityPlan) -> Table:
    return table(
        plan.schedule,
        ("order", _order),
        ("in operation", lambda each: "now" if each.month == 0 else f"month {each.month:.1f}"),
        ("basis", lambda _: _basis_word(plan, "schedule")),
        (">load", lambda each: f"x {each.factor:.2f}"),
        (">modules", lambda each: f"+{each.modules}"),
        (">total GPUs", lambda each: each.devices),
        title="Purchase schedule",
    )


def _order(purchase: CapacityAddition) -> str:
    order = "now" if purchase.order_month <= 0 else f"month {purchase.order_month:.1f}"
    if purchase.order_month < 0 < purchase.month:
        order += f", {-purchase.order_month:.1f} months late"
    return order


def _spillover(plan: CapacityPlan) -> Table:
    return table(
        plan.spillover,
        ("replicas", lambda each: each.replicas),
        ("basis", lambda _: _basis_word(plan, "spillover")),
        (">GPUs", lambda each: each.devices),
        (">max_in_flight", lambda each: each.bought.bound if each.replicas else None),
        (">spillover", lambda each: f"{each.bought.share:.2%}"),
        (">input tokens/h", lambda each: f"{each.bought.input_tokens_per_h:,.0f}"),
        (">output tokens/h", lambda each: f"{each.bought.output_tokens_per_h:,.0f}"),
        (">fallback cost/h", lambda each: _COST(each.bought.cost_per_h)),
        (">owned cost/h", lambda each: optional(each.owned_per_h, _COST)),
        (">total cost/h", lambda each: optional(each.total_per_h, _COST)),
        (">attainment", lambda each: f"{each.bought.served_within:.2%}" if each.replicas else None),
        title="Fewer replicas, with spillover to a fallback provider",
    )


def _basis_word(plan: CapacityPlan, part: str) -> str:
    """``measured``, ``fitted`` or ``assumed``: the first word of the part's basis."""
    return plan.basis[part].partition(":")[0]


def _mbit(bytes_per_s: float) -> str:
    return f"{8e-6 * bytes_per_s:.2f} Mbit/s"
