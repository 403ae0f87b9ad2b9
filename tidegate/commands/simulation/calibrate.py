"""``calibrate``."""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path

import click
import msgspec
from rich.progress import MofNCompleteColumn
from rich.table import Table

from policy.config.deployment import Deployment
from policy.document.parse import parse
from policy.engine.model_file import ModelFile, encode, model_file
from policy.errors import Unreachable
from serve.controller.client import ControllerClient
from sim.calibration.chart import curves
from store.state_dir import StateDir, write_atomic
from tidegate import document as documents
from tidegate.calibrate.calibration import CalibrationRun, served_shape
from tidegate.calibrate.twin_check import Check, calibrated_model, check, recorded_run
from tidegate.commands.simulation.bench import Real
from tidegate.commands.simulation.policy_options import policy_entries, simulated_policy
from tidegate.commands.terminal import FILE, Bar, console, moving
from tidegate.exit_codes import Exit
from tidegate.replay.http_client import Pool
from tidegate.supervisor.readiness import endpoint

_OUT = click.Path(dir_okay=False, path_type=Path)


def _url(_context: click.Context, _parameter: click.Parameter, given: str | None) -> str | None:
    """An http or https URL, if any is given."""
    try:
        if given is not None:
            Pool(given)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return given


@click.command(
    help="Drive the replicas of MODEL for a few minutes, fit an engine model to their steps, and write it "
    "with its error on load points that were held out: a file that a deployment names as a model's `profile`."
    "\n\nWith --check, compare a replay that `tidegate replay --record` wrote with the twin."
)
@click.argument("model")
@click.option("--url", callback=_url, help="The gateway; else that of the deployment that runs.")
@click.option("--key", default="", envvar="TIDEGATE_API_KEY", show_envvar=True, help="The gateway's API key.")
@click.option("--minutes", type=Real(0.1, 60), default=3.0, show_default=True, help="How long to drive them.")
@click.option("--shape", help="The shape that has to serve; a calibration is of one.")
@click.option("--out", type=_OUT, help="Where to write it; else MODEL-SHAPE.json.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, help="Of the prompts' words.")
@click.option("--check", "record", type=FILE, help="A recorded replay: drive nothing, and compare it.")
@click.option("--profile", type=FILE, help="With --check: the file of the calibrated engine model.")
@click.option(
    "-f", "--file", "document", type=FILE, help="With --check: the deployment; else the one that runs."
)
@click.option("--plot", type=_OUT, help="With --check: write the quantiles there, as SVG.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
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
        raise click.UsageError("--profile, --file and --plot go with --check")
    if record is not None and profile is None:
        raise click.UsageError("--check needs the calibrated engine model: --profile FILE")
    for option, path in (("--out", out), ("--plot", plot)):
        if path is not None and not path.absolute().parent.is_dir():
            raise click.BadParameter(f"{path}: expected a file in a folder that exists", param_hint=option)
    if record is not None and profile is not None:
        deployment = _running(state) if document is None else documents.load(document, ray=False).deployment
        _check(deployment, model, record=record, profile=profile, plot=plot, as_json=as_json)
        return
    deployment = _running(state)
    client = ControllerClient(deployment.cluster.controller, state.secret())
    subject = served_shape(client, deployment, model, shape)
    gateway = deployment.gateway
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    with _Bar() as bar:
        made = CalibrationRun(
            client,
            subject,
            url=url or endpoint(gateway.host, gateway.port),
            key=key,
            seed=seed,
            progress=bar,
            warn=bar.note,
        ).run(60.0 * minutes, now)
    path = out or Path(f"{model.replace('/', '@')}-{made.shape}.json")
    write_atomic(path, encode(made))
    if as_json:
        click.echo(msgspec.json.encode(made).decode())
    else:
        console().print(_points(made))
        click.echo(_said(made))
        click.echo(f"Written to {path}; name it as `profile` of the model in the deployment document.")
    if made.note:
        click.echo(f"tidegate: {made.note}", err=True)
        sys.exit(Exit.INACCURATE)


def _running(state: StateDir) -> Deployment:
    """The deployment that runs here; raises ``Unreachable`` where none does."""
    raw = state.load(state.deployment_path, dict[str, object])
    if raw is None:
        raise Unreachable(f"nothing was ever started on {state.root}")
    return parse(raw)


class _Bar(Bar):
    """Which load point it is at, on standard error: a bar, or a line each where none moves."""

    def __init__(self) -> None:
        super().__init__(moving(44, MofNCompleteColumn()))
        self._task = self._bar.add_task("warming up", total=None)

    def __call__(self, done: int, total: int, point: str) -> None:
        """So many points are done, and ``point`` is next."""
        self._bar.update(self._task, completed=done, total=total, description=point)
        if self._bar.disable and point:
            click.echo(f"{done + 1} of {total}: {point}", err=True)


def _points(made: ModelFile) -> Table:
    table = Table(title=f"{made.model}, shape {made.shape}", title_justify="left", box=None, pad_edge=False)
    table.add_column("clients", justify="right")
    for column in ("in", "out", "ended", "steps", "ITL p50 ms", "predicted", "TTFT p90 ms", "predicted"):
        table.add_column(column, justify="right")
    table.add_column("")
    for point in sorted(made.points, key=lambda each: (each.input_tokens, each.concurrency)):
        cells = []
        for measure in (point.itl_p50, point.ttft_p90):
            both = () if measure is None else (measure.measured, measure.predicted)
            cells += [f"{1e3 * seconds:.1f}" for seconds in both] or ["", ""]
        counts = (point.concurrency, point.input_tokens, point.output_tokens, point.requests, point.steps)
        table.add_row(*map(str, counts), *cells, "held out" if point.held else "")
    return table


def _said(made: ModelFile) -> str:
    engine, error = made.engine_model, made.error
    return (
        f"o {1e3 * engine.o:.4g} ms, w {1e3 * engine.w:.4g} ms, c {1e6 * engine.c:.4g} us/token, "
        f"g {1e9 * engine.g:.4g} ns/KV token, r {1e6 * engine.r:.4g} us/request, over {made.degree}; "
        f"path {1e3 * made.path_s:.3g} ms\n"
        f"At {error.points} load points that were held out: steps are off by {error.step_p50:.1%} (p90 "
        f"{error.step_p90:.1%}), ITL p50 by {error.itl_p50:.1%}, TTFT p90 by {error.ttft_p90:.1%}"
    )


def _check(
    deployment: Deployment, model: str, *, record: Path, profile: Path, plot: Path | None, as_json: bool
) -> None:
    raw = json.loads(profile.read_bytes())
    file = model_file(raw, str(profile))
    rows = recorded_run(record)
    alone = simulated_policy(calibrated_model(deployment, model, raw))
    (contender,) = policy_entries(alone, (), lambda event: click.echo(event, err=True))
    ends_at = rows[-1].at - rows[0].at
    found = check(alone, contender.policies, rows, file.path_s, lambda at: _far(at, ends_at))
    if plot is not None:
        title = f"{model}: {record.name} live, and in the twin ({file.said})"
        plot.write_text(curves(title, found.live.seconds, found.twin.seconds), encoding="utf-8")
    if as_json:
        click.echo(msgspec.json.encode(found.compared).decode())
        return
    console().print(_quantiles(found))
    if plot is not None:
        click.echo(f"The plot is in {plot}")


def _far(at: float, ends_at: float) -> None:
    if sys.stderr.isatty():
        click.echo(f"\rtwin: {at:.0f} of {ends_at:.0f} s", err=True, nl=at >= ends_at)


def _quantiles(found: Check) -> Table:
    compared = found.compared
    title = f"{compared.live} requests served live, {compared.twin} in the twin; seconds"
    table = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for column in ("", "quantile"):
        table.add_column(column)
    for column in ("live", "twin", "error"):
        table.add_column(column, justify="right")
    for measure, quantiles in compared.quantiles.items():
        for name, pair in quantiles.items():
            row = (f"{pair.live:.4f}", f"{pair.twin:.4f}", f"{pair.error:+.1%}")
            table.add_row(measure.upper(), name, *row)
    return table
