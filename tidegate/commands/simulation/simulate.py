"""``simulate``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import click
import msgspec
from rich.progress import TaskID, TextColumn
from rich.table import Table

from policy.engine.profiles import max_request_tokens
from policy.errors import ConfigError, TargetError
from sim.arrival import Arrival
from sim.charts.page import page
from sim.charts.table import figures, told
from sim.oracle.bounds import Bounds, bounds_of
from sim.results.comparison import PolicyComparison, compare
from sim.results.series import clock
from sim.twin.record import Record
from sim.twin.run import simulate as run
from sim.twin.scenario import EARTH, scenario_of
from sim.workload.file import arrivals_of
from sim.workload.model_names import ModelNames
from sim.workload.survey import survey
from sim.workload.traces.open import notes, opened
from sim.workload.transforms import slice_trace
from store.state_dir import StateDir
from tidegate import document as documents
from tidegate.commands.simulation.bench import Real
from tidegate.commands.simulation.policy_options import choices, policy_entries, simulated_policy
from tidegate.commands.terminal import FILE, Bar, console, moving, trace_option

_OUT = click.Path(dir_okay=False, path_type=Path)


@click.command(
    help="Replay a trace on the deployment in FILE before anything runs: the policies of production decide, "
    "on replicas that an engine model times."
)
@click.argument("file", type=FILE)
@trace_option(required=True)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="POLICY",
    help="Instead of the document's; several times too.",
)
@click.option("--compare", "several", metavar="A,B,C", help="Several policies, on the same arrivals.")
@click.option("--rate", type=Real(1e-6, 1e6), default=1.0, help="So many times as many requests per second.")
@click.option("--from-s", type=Real(0, 1e9), default=0.0, help="Begin so many seconds into the trace.")
@click.option("--to-s", type=Real(0, 1e9), help="End so many seconds into the trace.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, help="Of the chance in it.")
@click.option("--world", "world_file", type=FILE,
              help="A YAML file: how long starts take, and what goes wrong.")  # fmt: skip
@click.option("--no-oracle", is_flag=True, help="Leave out the bounds, which take the time of a few runs.")
@click.option("--report", type=_OUT, help="Write charts there, as one HTML file.")
@click.option("--log", type=_OUT, help="Write every decision that changed anything there, as lines of JSON.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
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
    world_file: Path | None,
    no_oracle: bool,
    report: Path | None,
    log: Path | None,
    as_json: bool,
) -> None:
    for option, out in (("--report", report), ("--log", log)):
        if out is not None and not out.absolute().parent.is_dir():
            raise click.BadParameter(f"{out}: expected a file in a folder that exists", param_hint=option)
        if out is not None and not os.access(out if out.exists() else out.absolute().parent, os.W_OK):
            raise click.BadParameter(f"{out}: expected a file that can be written", param_hint=option)
    if to_s is not None and to_s <= from_s:
        raise click.BadParameter(f"{to_s:g} is not after --from-s {from_s:g}", param_hint="--to-s")
    deployment = simulated_policy(documents.load(file, ray=False).deployment)
    given = [each for text in policies for each in choices("--policy", text)]
    given += choices("--compare", several) if several is not None else []
    compared = policy_entries(deployment, given, lambda event: click.echo(event, err=True))
    world = (
        EARTH if world_file is None else scenario_of(world_file, [spec.name for spec in deployment.models])
    )

    def arrivals() -> Iterator[Arrival]:
        return slice_trace(arrivals_of(trace, seed, rate), from_s, to_s)

    addressing = ModelNames([spec.name for spec in deployment.models])
    most = {
        spec.name: max(max_request_tokens(spec, shape) or sys.maxsize for shape in spec.shapes.values())
        for spec in deployment.models
    }
    with opened() as traces:
        surveyed = survey(arrivals(), addressing, most)
    for note in notes(traces):
        click.echo(note, err=True)
    if not surveyed.loads:
        raise ConfigError(str(trace), "no request", "a request at least, in the part that is replayed")
    if others := addressing.said():
        click.echo(others, err=True)
    for spec in deployment.models:
        load = surveyed.loads.get(spec.name)
        if load is not None and load.adapted and spec.adapters is None:
            asked = f"{load.adapted} of {load.requests} requests ask for adapters"
            click.echo(f"{spec.name}: {asked}, and fail: the document has no section 'adapters'", err=True)
        if load is not None and load.too_long:
            asked = f"{load.too_long} of {load.requests} requests have more tokens with their answers"
            click.echo(f"{spec.name}: {asked} than max_model_len, {most[spec.name]}, and fail", err=True)
    with _Bars(surveyed.ends_at) as bars, _Log(log) as logged:
        bounds = Bounds(why="not asked for")
        if not no_oracle:
            try:
                bounds = bounds_of(deployment, arrivals, surveyed, world, seed=seed, said=bars.note)
            except TargetError as error:
                bounds = Bounds(why=str(error))
        found = compare(
            compared,
            arrivals,
            lambda document, live, asked, said: run(document, live, asked, world=world, seed=seed, said=said),
            trace=trace.name,
            seed=seed,
            bounds=bounds,
            said=bars,
            kept=logged,
        )
    # What took so long to find is printed before anything that may fail.
    if as_json:
        click.echo(msgspec.json.encode(found.plain()).decode())
    else:
        _print(found)
    if report is not None:
        try:
            report.write_text(page(found), encoding="utf-8")
        except OSError as error:
            raise click.ClickException(f"{report}: {error.strerror}: the report is not written") from None
        if not as_json:
            click.echo(f"The report is in {report}")
    if logged.error is not None:
        raise click.ClickException(f"{log}: {logged.error.strerror}: not all decisions are written")


class _Bars(Bar):
    """How far each policy is in simulated time, on standard error: bars, or a line each where none moves."""

    def __init__(self, ends_at: float) -> None:
        self._ends_at = ends_at
        self._tasks: dict[str, TaskID] = {}
        self._done: set[str] = set()
        super().__init__(moving(24, TextColumn("{task.fields[now]} of {task.fields[end]}")))

    def __call__(self, name: str, at: float) -> None:
        """``name`` has come as far as the instant ``at``."""
        if self._bar.disable:
            # It goes on until the last request has ended.
            if at >= self._ends_at and name not in self._done:
                self._done.add(name)
                click.echo(f"{name}: {clock(self._ends_at)} of the trace are simulated", err=True)
            return
        if name not in self._tasks:
            self._tasks[name] = self._bar.add_task(
                name, total=self._ends_at, now=clock(0.0), end=clock(self._ends_at)
            )
        at = min(at, self._ends_at)
        self._bar.update(self._tasks[name], completed=at, now=clock(at))


class _Log:
    """The decisions of each policy as lines of JSON, if anybody wants them.

    A run goes on without its log, so that what it finds is printed; ``error`` is why lines are missing.
    """

    def __init__(self, path: Path | None) -> None:
        self.error: OSError | None = None
        self._file = None if path is None else path.open("wb")

    def __enter__(self) -> _Log:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            with suppress(OSError):  # of what was written before, which is told
                self._file.close()

    def __call__(self, name: str, record: Record) -> None:
        """Write those of ``record``."""
        if self._file is None or self.error is not None:
            return
        try:
            for at, decision in record.decisions:
                line = msgspec.json.encode({"policy": name, "at": at, "decision": decision})
                self._file.write(line + b"\n")
            self._file.flush()
        except OSError as error:
            self.error = error


def _print(found: PolicyComparison) -> None:
    click.echo(f"{found.trace}, seed {found.seed}; {told(found.bounds)}")
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("")
    for each in found.runs:
        table.add_column(each.name, justify="right")
    for row in figures(found.bounds):
        table.add_row(row.heading, *(row.shown(each.summary) for each in found.runs))
    console().print(table)
