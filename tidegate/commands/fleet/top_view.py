"""The screen of ``top``: tables that fit the width and height of a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from policy.signals.types import LatencyQuantiles, ModelDemand
from policy.types import Replica
from policy.wire.controller_reports import GpuReport
from serve.controller_api_schema import LoggedDecision, ModelStatus
from tidegate.commands.fleet.status import StatusData, colored
from tidegate.commands.terminal import table_of_rows
from tidegate.commands.units import age, clock, latency, rate

T = TypeVar("T")

# The widths of terminals from which on more columns are shown.
_WIDER, _WIDE, _MEDIUM, _NARROW = 140, 120, 90, 50
_HEIGHTS = "▁▂▃▄▅▆▇█"
_LEAST_CUT = 6
# Lines of headings, of the heads of tables and of the space between them.
_OTHER_LINES = 9
_LEAST_ROWS = 3


class TopData(msgspec.Struct, frozen=True, kw_only=True):
    """What is shown: the status, the ``latest`` decision of each model, the last changes, newest first.

    ``gpus`` are the reports on the GPUs of replicas, by their id; ``arrivals`` the load of each model in the
    last minutes, oldest first, ``None`` where it is not known.
    """

    status: StatusData
    latest: Mapping[str, LoggedDecision] = {}
    changes: Sequence[LoggedDecision] = ()
    gpus: Mapping[str, GpuReport] = {}
    arrivals: Mapping[str, Sequence[float | None]] = {}

    @property
    def nothing_runs(self) -> str:
        return f"Nothing is running on {self.status.state_dir}."


class _Column(NamedTuple, Generic[T]):
    """A column with its head, shown in a terminal of at least ``width`` columns.

    Text that is ``cut`` gives its place to the other columns where it is narrow.
    """

    head: str
    cell: Callable[[T], object]
    width: int = 0
    cut: bool = False
    style: str = ""


def render_top(data: TopData, width: int, height: int | None = None) -> RenderableType:
    """The screen for a terminal of ``width`` columns, with as many rows as fit its ``height``."""
    status, at = data.status, data.status.at
    models = sorted(status.models, key=lambda model: model.name)
    replicas = sorted(status.fleet.replicas, key=lambda replica: replica.id)
    changes = list(data.changes)
    if height is not None:
        left = max(2 * _LEAST_ROWS, height - _OTHER_LINES - len(models))
        below = max(_LEAST_ROWS, min(len(changes), left - len(replicas)))
        shown, changes = replicas[: left - below], changes[:below]
    else:
        shown = replicas
    more = len(replicas) - len(shown)
    return Group(
        _header(status, width),
        Text(),
        _table(models, _model_columns(data.latest, data.arrivals), width),
        Text(),
        _table(shown, _replica_columns(data.gpus), width),
        *([Text(f"and {more} more", style="dim")] if more else []),
        Text(),
        _table(changes, _change_columns(at), width)
        if changes
        else Text("no change of counts yet", style="dim"),
    )


def _header(status: StatusData, width: int) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append("tidegate top", style="bold")
    text.append(f"  {clock(status.at, status.at)}")
    if status.supervisor is not None:
        text.append("  ").append_text(colored(status.supervisor.phase))
        text.append(f"  up {age(status.at - status.supervisor.since)}")
        if width >= _MEDIUM:
            text.append(f"  {status.supervisor.endpoint}/v1")
    text.append(f"  controller: {status.controller}")
    return text


def _table(items: Sequence[T], columns: Sequence[_Column[T]], width: int) -> Table:
    kept = [column for column in columns if width >= column.width]
    made = table_of_rows(
        [column.head for column in kept], ([_cell(item, each) for each in kept] for item in items)
    )
    for column, wanted in zip(made.columns, kept, strict=True):
        # rich narrows the columns that may wrap first.
        column.no_wrap, column.overflow = not wanted.cut, "ellipsis"
        column.min_width = _LEAST_CUT if wanted.cut else None
    return made


def _cell(item: T, column: _Column[T]) -> object:
    value = column.cell(item)
    if column.cut and value is not None:
        return Text(str(value), style=column.style, no_wrap=True, overflow="ellipsis")
    return value


def _model_columns(
    latest: Mapping[str, LoggedDecision], arrivals: Mapping[str, Sequence[float | None]]
) -> list[_Column[ModelStatus]]:
    def of_demand(cell: Callable[[LoggedDecision, ModelDemand], object]) -> Callable[[ModelStatus], object]:
        def text(model: ModelStatus) -> object:
            logged = latest.get(model.name)
            demand = None if logged is None else logged.situation.signals.demand
            return None if logged is None or demand is None else cell(logged, demand)

        return text

    columns: list[_Column[ModelStatus]] = [
        _Column("model", lambda model: model.name, cut=True, style="bold"),
        _Column("mode", lambda model: model.mode or None, cut=True),
        _Column(
            ">ready", lambda model: f"{model.ready}/{'-' if model.phase == 'external' else model.target}"
        ),
        _Column("phase", lambda model: colored(model.phase), _MEDIUM),
        _Column(">load", of_demand(lambda _, demand: rate(demand.arrivals.last_6_s))),
        _Column(">in flight", of_demand(lambda _, demand: f"{demand.concurrency.last_6_s:.0f}"), _WIDE),
        _Column(">queue", of_demand(lambda _, demand: _queued(demand)), _NARROW),
        _Column(
            ">TTFT/SLO",
            of_demand(lambda logged, demand: _against(demand.ttft, logged.situation.slo.ttft_p95_s)),
            _NARROW,
        ),
        _Column(
            ">ITL/SLO",
            of_demand(lambda logged, demand: _against(demand.itl, logged.situation.slo.itl_p95_s)),
            _MEDIUM,
        ),
        _Column(">goodput", of_demand(_goodput)),
    ]
    if arrivals:
        columns.append(_Column("load, 10 min", lambda model: curve(arrivals.get(model.name, ())), _WIDER))
    return columns


def curve(values: Sequence[float | None]) -> str | None:
    """One character a value, its height relative to the largest; a space where there is none."""
    highest = max((value for value in values if value is not None), default=0.0)
    if not highest:
        return None
    steps = len(_HEIGHTS) - 1
    return "".join(" " if value is None else _HEIGHTS[round(value / highest * steps)] for value in values)


def _queued(demand: ModelDemand) -> Text:
    return Text(str(demand.queued), style="yellow" if demand.queued else "")


def _against(measured: LatencyQuantiles | None, limit: float | None) -> Text | None:
    """The 95th percentile beside its target."""
    if measured is None:
        return None
    if limit is None:
        return Text(f"{latency(measured.p95)}/-")
    return Text(f"{latency(measured.p95)}/{latency(limit)}", style="red" if measured.p95 > limit else "green")


def _goodput(logged: LoggedDecision, demand: ModelDemand) -> Text | None:
    if demand.ttft is None:
        return None
    missed = demand.met.both < logged.situation.slo.attainment
    return Text(f"{demand.met.both:.1%}", style="red" if missed else "green")


def _replica_columns(gpus: Mapping[str, GpuReport]) -> list[_Column[Replica]]:
    def of_gpus(cell: Callable[[GpuReport], object]) -> Callable[[Replica], object]:
        return lambda replica: cell(gpus[replica.id]) if replica.id in gpus else None

    return [
        _Column("replica", lambda replica: replica.id, cut=True),
        _Column("shape", lambda replica: replica.shape or None, _MEDIUM),
        _Column("state", lambda replica: colored(str(replica.state))),
        _Column(">in flight", _in_flight),
        _Column(">waiting", lambda replica: replica.load.waiting, _WIDE),
        _Column(">KV", lambda replica: f"{replica.load.kv_used:.0%}"),
        _Column(">adapters", lambda replica: len(replica.adapters), _MEDIUM),
        _Column("GPUs", lambda replica: ",".join(map(str, replica.cards)) or None, _WIDE),
        _Column(">power", of_gpus(lambda report: f"{report.watts:.0f} W")),
        _Column(">clock", of_gpus(lambda report: f"{report.clock_mhz} MHz"), _WIDE),
        _Column(">heat", of_gpus(_heat), _MEDIUM),
    ]


def _in_flight(replica: Replica) -> str:
    load = replica.load
    return f"{load.in_flight}/{load.bound}" if load.bound else str(load.in_flight)


def _heat(report: GpuReport) -> Text:
    return Text(f"{report.celsius:.0f} C", style="red" if report.throttled else "")


def _change_columns(at: float) -> list[_Column[LoggedDecision]]:
    return [
        _Column("change", lambda logged: f"{age(at - logged.decision.at)} ago"),
        _Column("model", lambda logged: logged.decision.model),
        _Column("from", lambda logged: f"{logged.decision.was_mode} x {logged.decision.was_count}", _MEDIUM),
        _Column("to", lambda logged: f"{logged.decision.mode} x {logged.decision.count}"),
        _Column("reason", lambda logged: logged.decision.reason, cut=True, style="dim"),
    ]
