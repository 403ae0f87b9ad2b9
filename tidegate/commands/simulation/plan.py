"""``plan``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
from rich.progress import TextColumn

from policy.config.deployment import Deployment, ModelSpec, Price
from policy.engine.model import Workload
from policy.errors import ConfigError
from sim.arrival import Arrival
from sim.planning.candidates import candidates
from sim.planning.demand import demand_of, describe
from sim.planning.plan import plan as made
from sim.planning.result import PlanRequest
from sim.planning.trial import Trials
from sim.workload.file import arrivals_of
from sim.workload.model_names import ModelNames
from sim.workload.traces.open import notes, opened
from sim.workload.transforms import scale_rate, slice_trace
from store.state_dir import StateDir
from tidegate import document
from tidegate.commands.simulation.bench import Real
from tidegate.commands.simulation.plan_tables import tables
from tidegate.commands.terminal import FILE, Bar, console, moving, trace_option


class _Numbers(click.ParamType[tuple[float, ...]]):
    """Numbers above 0, divided by commas."""

    name = "A,B,C"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        try:
            found = tuple(float(each) for each in str(value).split(","))
        except ValueError:
            found = ()
        if not found or not all(0.0 < each < 1e9 for each in found):
            self.fail(f"{value!r} is not numbers above 0, divided by commas, such as 1.5,2,4.", param, ctx)
        return found


class _Percent(Real):
    """A number with or without a per cent sign."""

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        return super().convert(str(value).removesuffix("%"), param, ctx)


@click.command(
    help="Find the fewest devices that meet the objective of a model in FILE, for a trace or a load that you "
    "describe: which kind, which shape, how many, now and as it grows, and what they take."
)
@click.argument("file", type=FILE)
@trace_option(required=False)
@click.option("--rate", type=Real(1e-6, 1e6), default=1.0, help="So many times as many requests per second.")
@click.option("--from-s", type=Real(0, 1e9), default=0.0, help="Begin so many seconds into the trace.")
@click.option("--to-s", type=Real(0, 1e9), help="End so many seconds into the trace.")
@click.option("--rps", type=Real(1e-3, 1e5), help="Without a trace: requests per second.")
@click.option("--input", "inputs", type=Real(1, 1e6), default=1000.0, help="Mean tokens of a prompt.")
@click.option("--output", "outputs", type=Real(1, 1e6), default=200.0, help="Mean tokens of an answer.")
@click.option("--cv", type=Real(0, 20), default=1.0, help="How bursty: 1 is random, above that in bursts.")
@click.option("--minutes", type=Real(1, 1440), default=10.0, help="How long the described load is tried.")
@click.option("--model", help="Which model of the document; the first, if not given.")
@click.option("--kinds", metavar="A,B", help="Only these kinds of devices, such as h100,l4.")
@click.option("--shapes", metavar="1,2", help="Only replicas of so many devices.")
@click.option("--growth", type=_Numbers(), default="1.5,2,4", help="Times the load, to plan for as well.")
@click.option("--price", "prices", multiple=True, metavar="KIND=N", help="What a device costs in an hour.")
@click.option("--upstream-price", type=_Numbers(), metavar="IN,OUT",
              help="What a million tokens cost elsewhere; as the document's upstream has it.")  # fmt: skip
@click.option("--growth-per-month", type=_Percent(0.1, 1000), help="In per cent: says when to add what.")
@click.option("--module", type=click.IntRange(1, 4096), default=8, help="Devices come so many at once.")
@click.option("--lead-weeks", type=Real(0, 520), default=8.0, help="From an order until it serves.")
@click.option("--most", type=click.IntRange(1, 4096), default=1024, help="The largest count that is tried.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, help="Of the chance in it.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def plan(
    _state: StateDir,
    *,
    file: Path,
    trace: Path | None,
    rate: float,
    from_s: float,
    to_s: float | None,
    rps: float | None,
    inputs: float,
    outputs: float,
    cv: float,
    minutes: float,
    model: str | None,
    kinds: str | None,
    shapes: str | None,
    growth: tuple[float, ...],
    prices: tuple[str, ...],
    upstream_price: tuple[float, ...] | None,
    growth_per_month: float | None,
    module: int,
    lead_weeks: float,
    most: int,
    seed: int,
    as_json: bool,
) -> None:
    if (trace is None) == (rps is None):
        raise click.UsageError("What is the load? Give either --trace, or --rps with --input and --output.")
    if to_s is not None and to_s <= from_s:
        raise click.BadParameter(f"{to_s:g} is not after --from-s {from_s:g}", param_hint="--to-s")
    if any(each <= 1.0 for each in growth):
        raise click.BadParameter("expected factors above 1, such as 1.5,2,4", param_hint="--growth")
    deployment = document.load(file, ray=False).deployment
    spec = deployment.models[0] if model is None else deployment.model(model)
    if spec.control.slo.ttft_p95_s is None and spec.control.slo.itl_p95_s is None:
        raise ConfigError(f"models[{spec.name}].control.slo", None, "ttft_p95_s or itl_p95_s to plan for")
    degrees = None if shapes is None else _degrees(shapes)
    found = candidates(spec, None if kinds is None else kinds.split(","), degrees)
    addressing = ModelNames([each.name for each in deployment.models])

    def arrivals(factor: float) -> Iterator[Arrival]:
        if trace is None:
            assert rps is not None
            load = Workload(lam=rps * factor, input_tokens=inputs, output_tokens=outputs)
            return describe(load, cv, minutes * 60.0, seed)
        part = slice_trace(arrivals_of(trace, seed, rate), from_s, to_s)
        return scale_rate((each for each in part if addressing.of(each) == spec.name), rate=factor)

    with opened() as traces:
        demand = demand_of(arrivals(1.0), str(trace or file))
    for note in notes(traces):
        click.echo(note, err=True)
    if others := addressing.said():
        click.echo(others, err=True)
    with _Bar() as bar:
        trials = Trials(deployment, spec, arrivals, demand, seed=seed, said=bar)
        ask = PlanRequest(
            growth=sorted(set(growth)),
            prices=_prices(prices, deployment, [each.kind for each in found]),
            gpu_peak_w=deployment.budget.gpu_watts,
            core_peak_w=deployment.budget.cpu_watts,
            monthly=None if growth_per_month is None else growth_per_month / 100.0,
            module=module,
            lead_weeks=lead_weeks,
            upstream=_upstream(upstream_price, deployment, spec),
            most=most,
            described=trace is None,
        )
        load = str(trace.name) if trace is not None else f"{rps:g} requests/s, cv {cv:g}"
        plan = made(trials, found, ask, load=load, seed=seed)
    if as_json:
        click.echo(msgspec.json.encode(plan).decode())
        return
    out = console()
    for each in tables(plan):
        out.print(each)
        out.print()


def _degrees(text: str) -> list[int]:
    if not all(each.isdigit() and 0 < int(each) <= 64 for each in text.split(",")):
        raise click.BadParameter(
            f"{text!r} is not whole numbers of devices, such as 1,2,4", param_hint="--shapes"
        )
    return sorted({int(each) for each in text.split(",")})


def _prices(given: tuple[str, ...], deployment: Deployment, kinds: list[str]) -> dict[str, float]:
    """What a device of each kind costs in an hour, as far as it is known."""
    budget = deployment.budget
    found = {}
    for kind in kinds:
        each = budget.cpu_cost_per_h if kind == "cpu" else budget.gpu_cost_per_h
        if each:
            found[kind] = each
    for text in given:
        kind, _, price = text.partition("=")
        if kind not in kinds:
            raise click.BadParameter(
                f"{text!r} names no kind that is planned: {', '.join(dict.fromkeys(kinds))}",
                param_hint="--price",
            )
        found[kind] = float(Real(0, 1e6).convert(price, None, None))
    return found


def _upstream(given: tuple[float, ...] | None, deployment: Deployment, spec: ModelSpec) -> Price | None:
    if given is not None:
        if len(given) != 2:
            raise click.BadParameter("two prices: of input and of output", param_hint="--upstream-price")
        return Price(input=given[0], output=given[1])
    return next((each.price for each in deployment.upstreams if spec.name in each.models), None)


class _Bar(Bar):
    """What is tried and how far it is, on standard error: a bar, or a line for each try where none moves."""

    def __init__(self) -> None:
        super().__init__(moving(40, TextColumn("{task.fields[tries]} tries")))
        self._task = self._bar.add_task("", total=1.0, tries=0)
        self._tries = 0

    def __call__(self, what: str, at: float, ends_at: float) -> None:
        """``what`` is tried, and has come to ``at`` of ``ends_at`` seconds."""
        if at == 0.0:
            self._tries += 1
            if self._bar.disable:
                click.echo(f"try {self._tries}: {what}", err=True)
        self._bar.update(
            self._task,
            description=what,
            completed=min(at, ends_at),
            total=ends_at,
            tries=self._tries,
        )
