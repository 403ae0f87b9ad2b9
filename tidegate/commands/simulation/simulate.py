"""``simulate``: replay a trace on a simulated deployment."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec

from policy.engine.builtin_profiles import max_request_tokens
from policy.errors import ConfigError, TargetError
from sim.arrivals import Arrival
from sim.charts.comparison_chart import comparison_chart
from sim.charts.comparison_table import comparison_rows, describe_bounds
from sim.charts.page import page
from sim.oracle.offline_optimum import GpuHourBounds, bounds_of
from sim.results.chart_series import clock
from sim.results.run_summary import PolicyComparison, compare
from sim.simulator.fault_scenario import NO_FAULTS, scenario_of
from sim.simulator.run import simulate as run
from sim.simulator.run_record import RunRecord
from sim.workload.per_model_load import ModelNames, trace_load
from sim.workload.traces.detect_format import notes, opened
from sim.workload.transforms import slice_trace
from sim.workload.workload_spec import arrivals_of
from store.state_dir import StateDir
from tidegate import deployment_file
from tidegate.commands.options import (
    FILE,
    OutputFile,
    as_json,
    file_argument,
    plot_option,
    rate_option,
    seed_option,
    slice_options,
    trace_option,
)
from tidegate.commands.simulation.policy_options import choices, policy_entries, simulated_policy
from tidegate.commands.terminal import ProgressBar, console, print_json, table_of_rows, warn


@click.command(
    help="Replay a trace on a simulation of the deployment in FILE. The scaling policies and the router are "
    "those of production; a performance model gives the step times of the replicas."
)
@file_argument
@trace_option(required=True)
@click.option(
    "--policy", "policies", multiple=True, metavar="POLICY",
    help="Scaling policy instead of the one in FILE, repeatable.",
)  # fmt: skip
@click.option("--compare", "several", metavar="A,B,C", help="Several policies, on the same arrivals.")
@rate_option
@slice_options("after")
@seed_option()
@click.option(
    "--scenario",
    "scenario_file",
    type=FILE,
    help="Fault scenario in YAML: start-up times and failures of replicas.",
)
@click.option(
    "--no-oracle", is_flag=True, help="Skip the lower bound and the offline optimum, which are slow."
)
@click.option("--report", type=OutputFile(), help="Write charts to this file, as HTML.")
@plot_option("a chart with a line for each policy")
@click.option(
    "--log", type=OutputFile(), help="Write each decision that changed something, as lines of JSON."
)
@as_json
@click.pass_obj
def simulate(
    _state: StateDir,
    *,
    file: Path,
    trace: Path,
    policies: tuple[str, ...],
    several: str | None,
    rate: float,
    from_s: float,
    to_s: float | None,
    seed: int,
    scenario_file: Path | None,
    no_oracle: bool,
    report: Path | None,
    plot: Path | None,
    log: Path | None,
    as_json: bool,
) -> None:
    deployment = simulated_policy(deployment_file.load(file, ray=False).deployment)
    given = [each for text in policies for each in choices("--policy", text)]
    given += choices("--compare", several) if several is not None else []
    compared = policy_entries(deployment, given, warn)
    scenario = (
        NO_FAULTS
        if scenario_file is None
        else scenario_of(scenario_file, [spec.name for spec in deployment.models])
    )

    def arrivals() -> Iterator[Arrival]:
        return slice_trace(arrivals_of(trace, seed, rate), from_s, to_s)

    model_names = ModelNames([spec.name for spec in deployment.models])
    max_tokens = {
        spec.name: max(max_request_tokens(spec, shape) or sys.maxsize for shape in spec.shapes.values())
        for spec in deployment.models
    }
    with opened() as traces:
        surveyed = trace_load(arrivals(), model_names, max_tokens)
    for note in notes(traces):
        warn(note)
    if not surveyed.loads:
        raise ConfigError(str(trace), "no request", "at least one request in the selected part")
    if others := model_names.description():
        warn(others)
    for spec in deployment.models:
        load = surveyed.loads.get(spec.name)
        if load is not None and load.adapted and spec.adapters is None:
            share = f"{load.adapted} of {load.requests} requests name an adapter"
            warn(f"{spec.name}: {share} and fail: the model has no section 'adapters'")
        if load is not None and load.too_long:
            share = f"{load.too_long} of {load.requests} requests exceed max_model_len"
            warn(f"{spec.name}: {share} ({max_tokens[spec.name]} tokens with their answers) and fail")
    ends_at = surveyed.ends_at
    decisions = _DecisionFile(log)
    with ProgressBar("simulated", clock) as bar:
        bounds = GpuHourBounds(why="not computed")
        if not no_oracle:
            try:
                bounds = bounds_of(deployment, arrivals, surveyed, scenario, seed=seed, progress=bar.note)
            except TargetError as error:
                bounds = GpuHourBounds(why=str(error))
        comparison = compare(
            compared,
            arrivals,
            lambda spec, live, asked, progress: run(
                spec, live, asked, scenario=scenario, seed=seed, progress=progress
            ),
            trace=trace.name,
            seed=seed,
            bounds=bounds,
            progress=lambda name, at: bar.update(at, ends_at, task=name),
            kept=decisions,
        )
    # Printed before the files are written: the result of a long run is not lost to a full disk.
    if as_json:
        print_json(comparison.plain())
    else:
        _print(comparison)
    for name, path, drawn in (("report", report, page), ("chart", plot, comparison_chart)):
        if path is None:
            continue
        try:
            path.write_text(drawn(comparison), encoding="utf-8")
        except OSError as error:
            raise click.ClickException(f"{path}: {error.strerror}: the {name} is not written") from None
        if not as_json:
            click.echo(f"{name.capitalize()} written to {path}")
    if decisions.error is not None:
        raise click.ClickException(f"{log}: {decisions.error.strerror}: not all decisions are written")


class _DecisionFile:
    """Writes decisions as lines of JSON, if there is a path; an I/O error does not stop the simulation."""

    def __init__(self, path: Path | None) -> None:
        self.error: OSError | None = None
        self._path = path
        if path is not None:
            path.write_bytes(b"")

    def __call__(self, name: str, record: RunRecord) -> None:
        if self._path is None or self.error is not None:
            return
        rows = [{"policy": name, "at": at, "decision": decision} for at, decision in record.decisions]
        try:
            with self._path.open("ab") as file:
                file.write(msgspec.json.Encoder().encode_lines(rows))
        except OSError as error:
            self.error = error


def _print(comparison: PolicyComparison) -> None:
    click.echo(f"{comparison.trace}, seed {comparison.seed}; {describe_bounds(comparison.bounds)}")
    runs = comparison.runs
    rows = (
        [row.heading, *(row.shown(run.summary) for run in runs)] for row in comparison_rows(comparison.bounds)
    )
    console().print(table_of_rows(["metric", *(f">{run.name}" for run in runs)], rows))
