"""``plan``: capacity planning for a trace or a described load."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from policy.config.deployment import Deployment, ModelSpec, ProviderPrice
from policy.engine.builtin_profiles import kind_and_size
from policy.engine.performance_model import EngineLoad
from policy.errors import ConfigError
from sim.arrivals import Arrival
from sim.planning.candidates import ShapeCandidate, candidates
from sim.planning.demand import demand_of, describe
from sim.planning.fleet_size_search import FleetRuns
from sim.planning.plan import expected_runs
from sim.planning.plan import plan as make_plan
from sim.planning.result import CapacityPlanRequest
from sim.results.chart_series import clock
from sim.workload.per_model_load import ModelNames
from sim.workload.traces.detect_format import notes, opened
from sim.workload.transforms import scale_rate, slice_trace
from sim.workload.workload_spec import arrivals_of
from store.state_dir import StateDir
from tidegate import deployment_file
from tidegate.commands.options import (
    CommaSeparated,
    FiniteFloat,
    as_json,
    file_argument,
    number_between,
    number_option,
    rate_option,
    seed_option,
    slice_options,
    trace_option,
)
from tidegate.commands.simulation.plan_tables import assumptions, describe_load, tables
from tidegate.commands.terminal import ProgressBar, console, print_json, warn
from tidegate.commands.units import age

_PRICES = CommaSeparated("IN,OUT", number_between(0, 1e9), "a price above 0")


class _Percent(FiniteFloat):
    """A number with or without a percent sign."""

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        return super().convert(str(value).removesuffix("%"), param, ctx)


def _degree(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) <= 64:
        raise ValueError
    return int(text)


@click.command(
    help="Find the fewest GPUs that meet the SLO of a model in FILE, for a trace or a described load: GPU "
    "type, GPUs per replica and replica count, now and as the load grows, with cost and power."
)
@file_argument
@trace_option(required=False)
@rate_option
@slice_options("after")
@number_option("--rps", FiniteFloat(1e-3, 1e5), None, "Requests per second, without a trace.")
@number_option("--input inputs", FiniteFloat(1, 1e6), 1000.0, "Mean input tokens.")
@number_option("--output outputs", FiniteFloat(1, 1e6), 200.0, "Mean output tokens.")
@number_option(
    "--cv",
    FiniteFloat(0, 20),
    1.0,
    "Variation coefficient of the time between requests: 1 is Poisson, above is bursty.",
)
@number_option("--minutes", FiniteFloat(1, 1440), 10.0, "Simulated time of a described load.")
@click.option("--model", help="Model of the deployment file; default: the first.")
@click.option("--kinds", metavar="A,B", help="GPU types to consider, e.g. h100,l4.")
@click.option(
    "--shapes",
    type=CommaSeparated("1,2", _degree, "numbers of GPUs up to 64"),
    help="GPUs per replica to consider.",
)
@click.option(
    "--growth", type=CommaSeparated("A,B,C", number_between(1, 1e9), "factors above 1"), default="1.5,2,4",
    show_default=True, help="Multiples of the load to plan for as well.",
)  # fmt: skip
@click.option(
    "--price", "prices", multiple=True, metavar="TYPE=N", help="Cost of a GPU of this type per hour."
)
@click.option("--upstream-price", type=_PRICES, help="Cost of a million tokens at a fallback provider; "
              "default: that of the deployment file.")  # fmt: skip
@number_option("--growth-per-month", _Percent(0.1, 1000), None, "Growth in percent, for a purchase schedule.")
@number_option("--module", click.IntRange(1, 4096), 8, "GPUs per purchase unit.")
@number_option("--lead-weeks", FiniteFloat(0, 520), 8.0, "Weeks from an order to operation.")
@number_option("--max-replicas", click.IntRange(1, 4096), 1024, "Maximum replica count.")
@seed_option()
@as_json
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
    shapes: tuple[int, ...] | None,
    growth: tuple[float, ...],
    prices: tuple[str, ...],
    upstream_price: tuple[float, ...] | None,
    growth_per_month: float | None,
    module: int,
    lead_weeks: float,
    max_replicas: int,
    seed: int,
    as_json: bool,
) -> None:
    if (trace is None) == (rps is None):
        raise click.UsageError("no load: give either --trace, or --rps with --input and --output")
    if upstream_price is not None and len(upstream_price) != 2:
        raise click.BadParameter("expected two prices, input and output", param_hint="--upstream-price")
    deployment = deployment_file.load(file, ray=False).deployment
    spec = deployment.models[0] if model is None else deployment.model(model)
    if spec.control.slo.ttft_p95_s is None and spec.control.slo.itl_p95_s is None:
        raise ConfigError(f"models[{spec.name}].control.slo", None, "ttft_p95_s or itl_p95_s to plan for")
    degrees = None if shapes is None else sorted(shapes)
    options = candidates(spec, None if kinds is None else kinds.split(","), degrees)
    model_names = ModelNames([each.name for each in deployment.models])

    def arrivals(factor: float) -> Iterator[Arrival]:
        if trace is None:
            assert rps is not None
            load = EngineLoad(lam=rps * factor, input_tokens=inputs, output_tokens=outputs)
            return describe(load, cv, minutes * 60.0, seed)
        part = slice_trace(arrivals_of(trace, seed, rate), from_s, to_s)
        return scale_rate((each for each in part if model_names.of(each) == spec.name), rate=factor)

    with opened() as traces:
        demand = demand_of(arrivals(1.0), str(trace or file))
    for note in notes(traces):
        warn(note)
    if others := model_names.description():
        warn(others)
    request = CapacityPlanRequest(
        growth=sorted(set(growth)),
        prices=_prices(prices, deployment, spec, options),
        gpu_peak_w=deployment.budget.gpu_watts,
        core_peak_w=deployment.budget.cpu_watts,
        monthly=None if growth_per_month is None else growth_per_month / 100.0,
        module=module,
        lead_weeks=lead_weeks,
        upstream=_upstream(upstream_price, deployment, spec),
        most=max_replicas,
        described=trace is None,
    )
    load = str(trace.name) if trace is not None else f"{rps:g} requests/s, cv {cv:g}"
    warn(describe_load(spec.name, load, seed, demand, spec.control.slo))
    for line in assumptions(spec, options, request):
        warn(line)
    tries, began = 0, time.monotonic()
    with ProgressBar("simulated", clock) as bar:

        def progress(candidate: str, at: float, ends_at: float) -> None:
            nonlocal tries
            tries += at == 0.0
            if tries == 2 and at == 0.0:
                runs, each_s = expected_runs(options, request), time.monotonic() - began
                bar.note(f"Estimate: {age(runs * each_s)} for about {runs} simulations of {age(each_s)}.")
            bar.update(at, ends_at, task="plan", step=str(tries), text=f"try {tries}: {candidate}")

        trials = FleetRuns(deployment, spec, arrivals, demand, seed=seed, progress=progress)
        plan = make_plan(trials, options, request, load=load, seed=seed)
    if as_json:
        print_json(plan)
        return
    out = console()
    for each in tables(plan):
        out.print(each)
        out.print()


def _prices(
    given: tuple[str, ...], deployment: Deployment, spec: ModelSpec, options: Sequence[ShapeCandidate]
) -> dict[str, float]:
    """The price per device-hour of each type: as given, else of the budget for the deployment's own type."""
    budget, (own, _) = deployment.budget, kind_and_size(spec.timed_by or "")
    types = [each.kind for each in options]
    costs = {}
    for each in options:
        gpu_cost = budget.gpu_cost_per_h if each.kind == own else 0.0
        if cost := budget.cpu_cost_per_h if each.device == "core" else gpu_cost:
            costs[each.kind] = cost
    for text in given:
        gpu_type, _, price = text.partition("=")
        if gpu_type not in types:
            raise click.BadParameter(
                f"{text!r} names no GPU type that is considered: {', '.join(dict.fromkeys(types))}",
                param_hint="--price",
            )
        costs[gpu_type] = float(FiniteFloat(0, 1e6).convert(price, None, None))
    return costs


def _upstream(
    given: tuple[float, ...] | None, deployment: Deployment, spec: ModelSpec
) -> ProviderPrice | None:
    if given is not None:
        return ProviderPrice(input=given[0], output=given[1])
    return next((each.price for each in deployment.upstreams if spec.name in each.models), None)
