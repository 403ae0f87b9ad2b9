"""``calibrate``: fit a performance model to live replicas, or compare a replay with the simulator."""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path

import click
from rich.table import Table

from policy.config.deployment import Deployment
from policy.engine.performance_model_file import PerformanceModelFile, encode, model_file
from serve.controller.client import ControllerClient
from sim.calibration.quantiles import LatencyComparison, curves
from store.state_dir import StateDir, write_atomic
from tidegate import deployment_file
from tidegate.calibrate.calibration import CalibrationRun, served_shape
from tidegate.calibrate.simulator_check import calibrated_model, check, recorded_run
from tidegate.commands.deployment_context import controller_client, stored_deployment
from tidegate.commands.options import (
    FILE,
    FiniteFloat,
    OutputFile,
    Url,
    as_json,
    key_option,
    plot_option,
    seed_option,
)
from tidegate.commands.simulation.policy_options import policy_entries, simulated_policy
from tidegate.commands.terminal import ProgressBar, console, print_json, table, table_of_rows, warn
from tidegate.commands.units import plural
from tidegate.exit_codes import ExitCode
from tidegate.supervisor.readiness import client_url


@click.command(
    help="Run load on the replicas of MODEL for a few minutes, fit a performance model to their step times, "
    "and write it with its error on held-out load points. Name the file as the model's `profile` in the "
    "deployment file.\n\nWith --check, compare a replay recorded by `tidegate replay --record` with the "
    "simulator."
)
@click.argument("model")
@click.option("--url", type=Url(), help="Gateway URL; default: that of the running deployment.")
@key_option
@click.option(
    "--minutes", type=FiniteFloat(0.1, 60), default=3.0, show_default=True, help="Duration of the load."
)
@click.option("--shape", help="Shape that must be serving; a calibration is for one shape.")
@click.option("--out", type=OutputFile(), help="File to write; default: MODEL-SHAPE.json.")
@seed_option()
@click.option("--check", "record", type=FILE, help="Recorded replay to compare; runs no load.")
@click.option("--profile", type=FILE, help="With --check: the calibrated performance model.")
@click.option(
    "-f", "--file", "document", type=FILE,
    help="With --check: the deployment file; default: that of the running deployment.",
)  # fmt: skip
@plot_option("a chart of the quantiles that --check compares")
@as_json
@click.pass_obj
def calibrate(
    state: StateDir,
    *,
    model: str,
    url: str | None,
    key: str,
    minutes: float,
    shape: str | None,
    out: Path | None,
    seed: int,
    record: Path | None,
    profile: Path | None,
    document: Path | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    if record is None and (profile or document or plot) is not None:
        raise click.UsageError("--profile, --file and --plot need --check")
    if record is not None and profile is None:
        raise click.UsageError("--check needs the calibrated performance model: --profile FILE")
    if document is None:
        deployment = stored_deployment(state)
    else:
        deployment = deployment_file.load(document, ray=False).deployment
    if record is not None and profile is not None:
        _check(deployment, model, record=record, profile=profile, plot=plot, as_json=as_json)
        return
    if document is None:
        client = controller_client(state)
    else:
        client = ControllerClient(deployment.cluster.controller, state.secret())
    subject = served_shape(client, deployment, model, shape)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    with ProgressBar("load points") as bar:

        def progress(done: int, total: int, point: str) -> None:
            step = f"{done + 1} of {total}: {point}" if point else ""
            bar.update(done, total, task="load points", step=step)

        fitted = CalibrationRun(
            client,
            subject,
            url=url or client_url(deployment.gateway),
            key=key,
            seed=seed,
            progress=progress,
            warn=bar.note,
        ).run(60.0 * minutes, now)
    path = out or Path(f"{model.replace('/', '@')}-{fitted.shape}.json")
    write_atomic(path, encode(fitted))
    if as_json:
        print_json(fitted)
    else:
        console().print(_points(fitted))
        click.echo(_describe(fitted))
        click.echo(f"Written to {path}. Name it as `profile` of the model in the deployment file.")
    if fitted.note:
        warn(f"tidegate: {fitted.note}")
        sys.exit(ExitCode.INACCURATE)


def _points(file: PerformanceModelFile) -> Table:
    return table(
        sorted(file.points, key=lambda point: (point.input_tokens, point.concurrency)),
        (">clients", lambda point: point.concurrency),
        (">input tokens", lambda point: point.input_tokens),
        (">output tokens", lambda point: point.output_tokens),
        (">requests", lambda point: point.requests),
        (">steps", lambda point: point.steps),
        (">ITL p50", lambda point: _ms(point.itl_p50, "measured")),
        (">predicted", lambda point: _ms(point.itl_p50, "predicted")),
        (">TTFT p90", lambda point: _ms(point.ttft_p90, "measured")),
        (">predicted", lambda point: _ms(point.ttft_p90, "predicted")),
        ("use", lambda point: "held out" if point.held else "fit"),
        title=f"{file.model}, shape {file.shape}",
    )


def _ms(measure: object, part: str) -> str:
    return "" if measure is None else f"{1e3 * getattr(measure, part):.1f} ms"


def _describe(file: PerformanceModelFile) -> str:
    model, error = file.engine_model, file.error
    return (
        f"Coefficients: o {1e3 * model.o:.4g} ms, w {1e3 * model.w:.4g} ms, c {1e6 * model.c:.4g} us/token, "
        f"g {1e9 * model.g:.4g} ns/KV token, r {1e6 * model.r:.4g} us/request, at degree {file.degree}; "
        f"network path {1e3 * file.path_s:.3g} ms\n"
        f"Relative error at {error.points} held-out load points: step time {error.step_p50:.1%} "
        f"(p90 {error.step_p90:.1%}), ITL p50 {error.itl_p50:.1%}, TTFT p90 {error.ttft_p90:.1%}"
    )


def _check(
    deployment: Deployment, model: str, *, record: Path, profile: Path, plot: Path | None, as_json: bool
) -> None:
    raw = json.loads(profile.read_bytes())
    file = model_file(raw, str(profile))
    others = {spec.name for spec in deployment.models} - {model}
    run = recorded_run(record, others)
    simulated = simulated_policy(calibrated_model(deployment, model, raw))
    (entry,) = policy_entries(simulated, (), warn)
    ends_at = run.rows[-1].at - run.rows[0].at
    with ProgressBar("s simulated") as bar:
        result = check(
            simulated, entry.policies, run, file.path_s, lambda at: bar.update(at, ends_at, task="simulator")
        )
    if plot is not None:
        title = f"{model}: {record.name}, live and simulated ({file.description})"
        plot.write_text(curves(title, result.live, result.simulated), encoding="utf-8")
    if as_json:
        print_json(result.compared)
        return
    console().print(_quantiles(result.compared))
    if (failed := result.compared.failed) > 0:
        click.echo(f"{plural(failed, 'request')} failed live: simulated as load, not compared.")
    if (left_out := result.compared.left_out) > 0:
        click.echo(f"{plural(left_out, 'request')} of other models left out.")
    if plot is not None:
        click.echo(f"Chart written to {plot}")


def _quantiles(compared: LatencyComparison) -> Table:
    return table_of_rows(
        ("metric", "quantile", ">live", ">simulated", ">error"),
        (
            (measure.upper(), name, f"{pair.live:.4f} s", f"{pair.simulated:.4f} s", f"{pair.error:+.1%}")
            for measure, quantiles in compared.quantiles.items()
            for name, pair in quantiles.items()
        ),
        title=f"{compared.live} requests served live, {compared.simulated} simulated",
    )
