"""A plan as tables: what to have first, then what it takes, and what each number rests on."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from sim.planning.plan import SPARE
from sim.planning.result import Option, Plan

_NONE = "-"


def tables(plan: Plan) -> Iterator[Table | Text]:
    """Each part of ``plan``, in the order in which it is read."""
    yield _load(plan)
    yield _options(plan)
    best = plan.options[0]
    if best.replicas is None:
        yield Text("No count of any kind meets the objective.")
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
    promised = [
        f"{name} {seconds:g} s"
        for name, seconds in (("TTFT", plan.ttft_p95_s), ("ITL", plan.itl_p95_s))
        if seconds is not None
    ]
    return Text(
        f"{plan.model}, {plan.load}, seed {plan.seed}: {demand.requests} requests in {demand.lasts_s:.0f} s, "
        f"{demand.peak_rps:.2f}/s in the busiest minute; {demand.input_tokens:.0f} tokens in and "
        f"{demand.output_tokens:.0f} out, on average\n"
        f"{plan.attainment:.1%} of them within {' and '.join(promised)}"
    )


def _options(plan: Plan) -> Table:
    title = f"Fewest of each, the best first by {'cost' if plan.by_cost else 'devices'}"
    table = _table(title, "kind", "a replica", "mode", "basis")
    columns = ("replicas", "devices", "and a spare", "attained", "TTFT p95 s", "ITL p95 s", "cost/h")
    for name in columns:
        table.add_column(name, justify="right")
    for each in plan.options:
        table.add_row(
            each.kind,
            f"{each.degree} {each.device}{'s' if each.degree > 1 else ''}",
            each.mode or f"none up to {plan.most}",
            each.basis.value,
            _count(each.replicas),
            _count(each.devices),
            _count(each.with_spare),
            _figure(each.attainment, ".2%"),
            _figure(each.ttft_p95_s, ".3f"),
            _figure(each.itl_p95_s, ".4f"),
            _figure(each.cost_per_h, ".2f"),
        )
    return table


def _best(plan: Plan, best: Option) -> Table:
    failure, power, network = plan.failure, plan.power, plan.network
    assert failure is not None and power is not None and network is not None
    title = f"{_replicas(best.replicas)} of {best.degree} x {best.kind}, and {SPARE} spare"
    table = _table(title, "", "", "basis")

    def row(what: str, said: str, part: str) -> None:
        table.add_row(what, said, _word(plan, part))

    row(
        f"busiest {failure.away_s:g} s",
        f"{failure.none.attainment:.2%} within the objective without the spare and without a failure",
        "counts",
    )
    row(
        "  one crashes",
        f"{failure.with_spare.attainment:.2%} with the spare, {failure.without_spare.attainment:.2%} "
        f"without; {failure.with_spare.cut} answers cut off",
        "failure",
    )
    row(
        "power",
        f"{power.mean_w / 1000:.2f} kW on average, {power.peak_w / 1000:.2f} kW at most",
        "power",
    )
    row("heat", f"{power.heat_btu_per_h:.0f} BTU/h at most", "power")
    row("energy", f"{power.kwh_per_day:.1f} kWh a day", "power")
    if power.joules_per_token is not None:
        row("", f"{power.joules_per_token:.2f} J a token, read or written", "power")
    row("gateway's network", f"{_mbit(network.each_way)} each way", "requests")
    row("  requests", f"{_mbit(network.requests)}, {_mbit(network.replica_in)} a replica", "requests")
    row(
        "  streams",
        f"{_mbit(network.streams)} in {network.events_per_s:.0f} events/s, "
        f"{_mbit(network.replica_out)} a replica",
        "streams",
    )
    row("open at once", f"{network.streams_open} requests, each a connection on either side", "counts")
    return table


def _growth(plan: Plan) -> Table:
    table = _table("As the load grows, with the spare", "load", "basis")
    for name in ("replicas", "devices", "kW at most", "BTU/h", "cost/h"):
        table.add_column(name, justify="right")
    for each in plan.growth:
        table.add_row(
            f"x {each.factor:g}",
            _word(plan, "growth"),
            f"{each.replicas} + {SPARE}",
            str(each.devices),
            f"{each.peak_w / 1000:.2f}",
            f"{each.heat_btu_per_h:.0f}",
            _figure(each.cost_per_h, ".2f"),
        )
    return table


def _schedule(plan: Plan) -> Table:
    table = _table("When to add what", "order", "serves", "basis")
    for name in ("load", "modules", "devices then"):
        table.add_column(name, justify="right")
    for each in plan.schedule:
        order = "at once" if each.order_month <= 0 else f"month {each.order_month:.1f}"
        if each.order_month < 0 < each.month:
            order += f", {-each.order_month:.1f} months late"
        table.add_row(
            order,
            "now" if each.month == 0 else f"month {each.month:.1f}",
            _word(plan, "schedule"),
            f"x {each.factor:.2f}",
            f"+{each.modules}",
            str(each.devices),
        )
    return table


def _overflow(plan: Plan) -> Table:
    table = _table("Owning less, and buying the rest elsewhere", "replicas", "basis")
    bought = ("max_in_flight", "overflows", "tokens/h in", "tokens/h out", "bought/h")
    for name in ("devices", *bought, "owned/h", "together/h", "kept within"):
        table.add_column(name, justify="right")
    for each in plan.overflow:
        found = each.bought
        table.add_row(
            str(each.replicas),
            _word(plan, "overflow"),
            str(each.devices),
            str(found.bound) if each.replicas else _NONE,
            f"{found.share:.2%}",
            f"{found.input_tokens_per_h:,.0f}",
            f"{found.output_tokens_per_h:,.0f}",
            f"{found.cost_per_h:.2f}",
            _figure(each.owned_per_h, ".2f"),
            _figure(each.total_per_h, ".2f"),
            f"{found.served_within:.2%}" if each.replicas else _NONE,
        )
    return table


def _basis(plan: Plan) -> Table:
    table = _table("What the numbers rest on", "", "")
    for part, said in plan.basis.items():
        table.add_row(part, said)
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for name in columns:
        table.add_column(name)
    return table


def _word(plan: Plan, part: str) -> str:
    """The first word of what the part rests on."""
    return plan.basis[part].partition(":")[0]


def _replicas(count: int | None) -> str:
    return "1 replica" if count == 1 else f"{count} replicas"


def _figure(value: float | None, how: str) -> str:
    return _NONE if value is None else format(value, how)


def _count(value: int | None) -> str:
    return _NONE if value is None else str(value)


def _mbit(bytes_per_s: float) -> str:
    return f"{8e-6 * bytes_per_s:.2f} Mbit/s"
