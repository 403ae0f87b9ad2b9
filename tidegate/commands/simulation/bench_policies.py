"""``bench policies``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import msgspec
from rich.progress import MofNCompleteColumn
from rich.table import Table as Grid

from policy.errors import ConfigError, TargetError
from policy.scaling.policies.registry import NAMES
from sim.benchmarks.policies.all_runs import run_all, trials
from sim.benchmarks.policies.chart import chart
from sim.benchmarks.policies.ranking import Ranking, RankingTable, rank
from sim.benchmarks.policies.run import TrialResult
from sim.benchmarks.policies.setup import TraceHalf, setup_of
from sim.benchmarks.policies.sizing import ReplicaSize, size_of
from tidegate.commands.terminal import console, moving

_KINDS = (".csv", ".jsonl", ".gz")
# With --quick: one seed, and every third setting.
_QUICK = 3


class PolicyScore(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one trace."""

    trace: str
    half: str
    seeds: int
    profile: str
    size: ReplicaSize
    table: RankingTable


class _Leads(click.ParamType[tuple[float, ...]]):
    name = "SECONDS,..."

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            found = tuple(float(each) for each in str(value).split(","))
        except ValueError:
            found = ()
        if not found or not all(0 < each <= 3600 for each in found):
            self.fail(f"{value!r}: expected seconds above 0 and up to 3600, divided by commas", param, ctx)
        return found


class _Policies(click.ParamType[tuple[str, ...]]):
    name = "NAME,..."

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        found = tuple(dict.fromkeys(str(value).split(",")))
        for each in found:
            if each not in NAMES:
                self.fail(f"{each!r}: expected some of {', '.join(NAMES)}", param, ctx)
        return found


@click.command(
    help="Run every scaling policy at many settings on traces in simulation, and compare what each takes "
    "for the same service with a plan that knows the future."
)
@click.option(
    "--traces", "where", type=click.Path(path_type=Path), default=Path("../shared/traces"),
    envvar="TIDEGATE_TRACES", show_default=True, show_envvar=True, help="A trace, or a folder of them.",
)  # fmt: skip
@click.option(
    "--leads", type=_Leads(), default="30,120", show_default=True, help="How long starts take, in s."
)
@click.option("--seeds", type=click.IntRange(1, 100), default=5, show_default=True, help="How many.")
@click.option(
    "--half", type=click.Choice([str(each) for each in TraceHalf]), default=str(TraceHalf.JUDGE),
    show_default=True, help="Of each trace: defaults were tuned on the first.",
)  # fmt: skip
@click.option("--policies", "names", type=_Policies(), default=",".join(NAMES), help="Only these.")
@click.option("--quick", is_flag=True, help="One seed, and a third of the settings.")
@click.option("--processes", type=click.IntRange(1, 256), help="How many run at once; one for each core.")
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path),
    help="Write the fronts there, as SVG; of several traces the name of each is added.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def policies(
    *,
    where: Path,
    leads: tuple[float, ...],
    seeds: int,
    half: str,
    names: tuple[str, ...],
    quick: bool,
    processes: int | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    if plot is not None and not plot.absolute().parent.is_dir():
        raise click.BadParameter(f"{plot}: expected a file in a folder that exists", param_hint="--plot")
    traces = _traces(where)
    count = 1 if quick else seeds
    found = []
    for trace in traces:
        ground = setup_of(trace, TraceHalf(half))
        click.echo(f"{trace.name}: what a replica takes", err=True)
        try:
            size = size_of(ground, leads[0])
            field = trials(
                ground, size, names, leads_s=leads, seeds=range(count), each=_QUICK if quick else 1
            )
            with _bar(trace.name, len(field)) as advance:
                table = rank(run_all(field, processes, advance))
        except ValueError as error:
            raise TargetError(f"{trace.name}: {error}") from None
        judged = PolicyScore(
            trace=trace.name, half=half, seeds=count, profile=ground.profile, size=size, table=table
        )
        found.append(judged)
        if plot is not None:
            path = plot if len(traces) == 1 else plot.with_stem(f"{plot.stem}-{trace.stem}")
            path.write_text(chart(_title(judged), table, ground.attainment), encoding="utf-8")
            click.echo(f"The plot is in {path}", err=True)
        if not as_json:
            _print(judged)
    if as_json:
        click.echo(msgspec.json.encode({"traces": found}).decode())


def _traces(where: Path) -> list[Path]:
    if where.is_file():
        return [where]
    found = sorted(path for path in where.glob("*") if path.suffix in _KINDS) if where.is_dir() else []
    if not found:
        raise ConfigError("--traces", str(where), f"a trace, or a folder with files in {', '.join(_KINDS)}")
    return found


@contextmanager
def _bar(name: str, total: int) -> Iterator[Callable[[TrialResult], None]]:
    """How many runs have ended, on standard error: a bar on a terminal, now and then a line elsewhere."""
    bar = moving(0, MofNCompleteColumn())
    task = bar.add_task(name, total=total)
    ended = 0

    def advance(lap: TrialResult) -> None:
        nonlocal ended
        ended += 1
        bar.advance(task)
        if bar.disable and ended % max(1, total // 10) == 0:
            click.echo(f"{name}: {ended} of {total} runs", err=True)

    with bar:
        yield advance


def _title(judged: PolicyScore) -> str:
    half = "first half" if judged.half == TraceHalf.TUNE else "second half"
    load = f"{judged.size.factor:g} x its load on {judged.profile}"
    return f"{judged.trace}, {half}, {load}, {judged.seeds} seed{'s' if judged.seeds > 1 else ''}"


def _print(judged: PolicyScore) -> None:
    for oracle in judged.table.oracles:
        grid = Grid(
            title=f"{_title(judged)}, a start takes {oracle.lead_s:g} s\n"
            f"clairvoyant plan: {oracle.gpu_hours:.2f} GPU-hours ({oracle.plan_gpu_hours:.2f} on paper, "
            f"bound {oracle.lower_gpu_hours:.2f}), {oracle.replicas:.1f} replicas, "
            f"attains {oracle.attainment:.2%}",
            title_justify="left", box=None, header_style="bold", pad_edge=False,
        )  # fmt: skip
        grid.add_column("policy")
        for column in (
            "GPU-h at 99 %", "x plan", "of seeds", "x bound", "attained", "good/GPU-h", "TTFT p99 s",
            "recovery s", "switches", "forecast", "lead", "whole",
        ):  # fmt: skip
            grid.add_column(column, justify="right")
        for each in judged.table.standings:
            if each.lead_s == oracle.lead_s:
                grid.add_row(*_row(each))
        console().print(grid)


def _row(each: Ranking) -> tuple[str, ...]:
    def number(value: float | None, digits: int = 2) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    spread = "-" if each.least_ratio is None else f"{each.least_ratio:.2f}-{each.most_ratio:.2f}"
    regret = each.regret
    parts = (None, None, None) if regret is None else (
        regret.forecast_s / 3600, regret.lead_s / 3600, regret.integrality_s / 3600
    )  # fmt: skip
    return (
        each.policy,
        number(each.gpu_hours),
        number(each.oracle_ratio),
        spread,
        number(each.lower_ratio),
        f"{each.attainment:.2%}",
        f"{each.goodput_per_gpu_hour:.0f}",
        number(each.ttft_p99_s),
        number(each.recovery_s, 0),
        number(each.switches, 0),
        *(number(part) for part in parts),
    )
