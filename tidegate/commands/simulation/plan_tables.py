"""A capacity plan as tables: the options, the best one in detail, growth, and the basis of each number."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from sim.planning.plan import SPARE
from sim.planning.result import Option, Plan
from tidegate.commands.terminal import table
from tidegate.commands.units import latency, plural

_NONE = "-"


def tables(plan: Plan) -> Iterator[Table | Text]:
    """The parts of ``plan`` in reading order."""
    yield _load(plan)
    yield _options(plan)
    best = plan.options[0]
    if best.replicas is None:
        yield Text(f"No replica count up to {plan.most} of any GPU type meets the SLO.")
        return
    yield _best(plan, best)
    yield _growth(plan)
    if plan.schedule:
        yield _schedule(plan)
    if plan.overflow:
        yield _overflow(plan)
    yield _basis(plan)


def _load(plan: Plan) -> Text:
    demand = plan.demand
    slo = [
        f"{name} p95 {latency(seconds)}"
        for name, seconds in (("TTFT", plan.ttft_p95_s), ("ITL", plan.itl_p95_s))
        if seconds is not None
    ]
    return Text(
        f"{plan.model}, {plan.load}, seed {plan.seed}: {demand.requests} requests in {demand.lasts_s:.0f} s, "
        f"peak minute {demand.peak_rps:.2f}/s; mean {demand.input_tokens:.0f} input and "
        f"{demand.output_tokens:.0f} output tokens\n"
        f"SLO: {' and '.join(slo)} for {plan.attainment:.1%} of requests"
    )


def _options(plan: Plan) -> Table:
    rows = table(
        *("GPU type", "per replica", "mode", "basis", ">replicas", ">GPUs", ">with a spare", ">attainment"),
        *(">TTFT p95", ">ITL p95", ">cost/h"),
        title=f"Fewest GPUs of each type, best first by {'cost' if plan.by_cost else 'number of GPUs'}",
    )
    for each in plan.options:
        rows.add_row(
            each.kind,
            f"{each.degree} {each.device}{'s' if each.degree > 1 else ''}",
            each.mode or f"none up to {plan.most} replicas",
            each.basis.value,
            _count(each.replicas),
            _count(each.devices),
            _count(each.with_spare),
            _format(each.attainment, ".2%"),
            _NONE if each.ttft_p95_s is None else latency(each.ttft_p95_s),
            _NONE if each.itl_p95_s is None else f"{1e3 * each.itl_p95_s:.1f} ms",
            _format(each.cost_per_h, ".2f"),
        )
    return rows


def _best(plan: Plan, best: Option) -> Table:
    failure, power, network = plan.failure, plan.power, plan.network
    assert failure is not None and power is not None and network is not None
    replicas = plural(best.replicas or 0, "replica")
    rows = table(
        *("resource", "need", "basis"),
        title=f"{replicas} with {best.degree} x {best.kind} each, and {SPARE} spare",
    )

    def row(name: str, need: str, part: str) -> None:
        rows.add_row(name, need, _basis_word(plan, part))

    row(
        f"busiest {failure.away_s:g} s",
        f"{failure.none.attainment:.2%} within the SLO without a failure and without the spare",
        "counts",
    )
    row(
        "  one replica crashes",
        f"{failure.with_spare.attainment:.2%} with the spare, {failure.without_spare.attainment:.2%} "
        f"without; {failure.with_spare.cut} streams cut",
        "failure",
    )
    row("power", f"mean {power.mean_w / 1000:.2f} kW, max {power.peak_w / 1000:.2f} kW", "power")
    row("heat", f"max {power.heat_btu_per_h:.0f} BTU/h", "power")
    row("energy", f"{power.kwh_per_day:.1f} kWh/day", "power")
    if power.joules_per_token is not None:
        row("", f"{power.joules_per_token:.2f} J per input or output token", "power")
    row("gateway network", f"{_mbit(network.each_way)} in each direction", "requests")
    row("  requests", f"{_mbit(network.requests)}, {_mbit(network.replica_in)} per replica", "requests")
    row(
        "  streams",
        f"{_mbit(network.streams)} in {network.events_per_s:.0f} events/s, "
        f"{_mbit(network.replica_out)} per replica",
        "streams",
    )
    row("concurrent requests", f"{network.streams_open}, each with a connection on both sides", "counts")
    return rows


def _growth(plan: Plan) -> Table:
    rows = table(
        *("load", "basis", ">replicas", ">GPUs", ">max power", ">max heat", ">cost/h"),
        title="As the load grows, with the spare",
    )
    for each in plan.growth:
        rows.add_row(
            f"x {each.factor:g}",
            _basis_word(plan, "growth"),
            f"{each.replicas} + {SPARE}",
            str(each.devices),
            f"{each.peak_w / 1000:.2f} kW",
            f"{each.heat_btu_per_h:.0f} BTU/h",
            _format(each.cost_per_h, ".2f"),
        )
    return rows


def _schedule(plan: Plan) -> Table:
    rows = table(
        *("order", "in operation", "basis", ">load", ">modules", ">total GPUs"), title="Purchase schedule"
    )
    for each in plan.schedule:
        order = "now" if each.order_month <= 0 else f"month {each.order_month:.1f}"
        if each.order_month < 0 < each.month:
            order += f", {-each.order_month:.1f} months late"
        rows.add_row(
            order,
            "now" if each.month == 0 else f"month {each.month:.1f}",
            _basis_word(plan, "schedule"),
            f"x {each.factor:.2f}",
            f"+{each.modules}",
            str(each.devices),
        )
    return rows


def _overflow(plan: Plan) -> Table:
    rows = table(
        *("replicas", "basis", ">GPUs", ">max_in_flight", ">spillover"),
        *(">input tokens/h", ">output tokens/h"),
        *(">fallback cost/h", ">owned cost/h", ">total cost/h", ">attainment"),
        title="Fewer replicas, with spillover to a fallback provider",
    )
    for each in plan.overflow:
        bought = each.bought
        rows.add_row(
            str(each.replicas),
            _basis_word(plan, "overflow"),
            str(each.devices),
            str(bought.bound) if each.replicas else _NONE,
            f"{bought.share:.2%}",
            f"{bought.input_tokens_per_h:,.0f}",
            f"{bought.output_tokens_per_h:,.0f}",
            f"{bought.cost_per_h:.2f}",
            _format(each.owned_per_h, ".2f"),
            _format(each.total_per_h, ".2f"),
            f"{bought.served_within:.2%}" if each.replicas else _NONE,
        )
    return rows


def _basis(plan: Plan) -> Table:
    rows = table("number", "basis", title="Basis of the numbers")
    for row in plan.basis.items():
        rows.add_row(*row)
    return rows


def _basis_word(plan: Plan, part: str) -> str:
    """``measured``, ``fitted`` or ``assumed``: the first word of the part's basis."""
    return plan.basis[part].partition(":")[0]


def _format(value: float | None, form: str) -> str:
    return _NONE if value is None else format(value, form)


def _count(value: int | None) -> str:
    return _NONE if value is None else str(value)


def _mbit(bytes_per_s: float) -> str:
    return f"{8e-6 * bytes_per_s:.2f} Mbit/s"
