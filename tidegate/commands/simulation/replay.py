"""``replay``."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
import uvloop
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from rich.table import Table

from sim.arrival import Arrival
from sim.workload.file import arrivals_of
from sim.workload.traces.open import notes, opened
from sim.workload.transforms import scale_rate, slice_trace
from tidegate.commands.durations import duration
from tidegate.commands.simulation.bench import Real
from tidegate.commands.terminal import console, moving
from tidegate.exit_codes import Exit
from tidegate.replay.capture_file import CaptureFile, in_order
from tidegate.replay.http_client import Pool
from tidegate.replay.results import LATE_S, RequestResult
from tidegate.replay.run import Endpoint, ReplayResult
from tidegate.replay.run import capture as hear
from tidegate.replay.run import replay as play

T = TypeVar("T")


class _Url(click.ParamType[str]):
    """An http or https URL."""

    name = "url"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            Pool(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return value


@click.command(
    help="Send the requests of TRACE, or of a workload in YAML, to an endpoint at the instants that it has, "
    "whatever the endpoint does, and say how it answered. Prompts are made up to the trace's "
    "lengths and shared beginnings.\n\n"
    "With --capture, write a trace of what a gateway serves: lengths, times, adapters and hashes, never text."
)
@click.argument("trace", required=False, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--url", type=_Url(), default="http://127.0.0.1:8080", show_default=True, help="The endpoint.")
@click.option("--model", default="", help="What requests name; else the trace's, or the endpoint's first.")
@click.option(
    "--key", default="", envvar="TIDEGATE_API_KEY", show_envvar=True, help="The endpoint's API key."
)
@click.option("--chat", is_flag=True, help="Ask /v1/chat/completions instead of /v1/completions.")
@click.option(
    "--exact/--own-lengths",
    default=True,
    help="Have answers as long as the trace's (ignore_eos, min_tokens), where the endpoint takes that.",
)
@click.option("--rate", type=Real(1e-6, 1e6), default=1.0, help="So many times as fast as the trace.")
@click.option("--from-s", type=Real(0, 1e12), default=0.0, help="Begin at this second of the trace.")
@click.option("--to-s", type=Real(0, 1e12), help="End before this second of the trace.")
@click.option("--limit", type=click.IntRange(min=1), help="At most so many requests.")
@click.option(
    "--max-in-flight", type=click.IntRange(1, 60_000), default=4096, show_default=True,
    help="What comes while so many are open waits, and is late.",
)  # fmt: skip
@click.option(
    "--seed", type=click.IntRange(0, 2**63 - 1), help="Of prompts and workloads; else another each time."
)
@click.option(
    "--record", type=click.Path(dir_okay=False, path_type=Path), help="Write a line of JSON for each request."
)
@click.option(
    "--capture", type=click.Path(dir_okay=False, path_type=Path), help="Write a trace there; no TRACE then."
)
@click.option(
    "--admin-url",
    type=_Url(),
    default="http://127.0.0.1:8081",
    show_default=True,
    help="The admin port of the gateway to capture.",
)
@click.option("--for", "for_s", metavar="TERM", type=duration, help="Capture for so long, such as 90s or 2h.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def replay(
    *,
    trace: Path | None,
    url: str,
    model: str,
    key: str,
    chat: bool,
    exact: bool,
    rate: float,
    from_s: float,
    to_s: float | None,
    limit: int | None,
    max_in_flight: int,
    seed: int | None,
    record: Path | None,
    capture: Path | None,
    admin_url: str,
    for_s: float | None,
    as_json: bool,
) -> None:
    if (trace is None) == (capture is None):
        raise click.UsageError("expected either a TRACE to replay or --capture FILE")
    for option, path in (("--record", record), ("--capture", capture)):
        if path is not None and not path.absolute().parent.is_dir():
            raise click.BadParameter(f"{path}: expected a file in a folder that exists", param_hint=option)
    if capture is not None:
        _capture(capture, admin_url, for_s, as_json)
        return
    if for_s is not None:
        raise click.UsageError("--for is of --capture: a replay ends with --to-s")
    assert trace is not None
    if to_s is not None and to_s <= from_s:
        raise click.BadParameter(f"{to_s:g}: expected more than --from-s {from_s:g}", param_hint="--to-s")
    seed = secrets.randbits(32) if seed is None else seed
    source = _Source(trace, seed, from_s, to_s, rate, limit)
    # Read once in vain, so that a line that is none is refused before anything is sent.
    with Console(stderr=True).status(f"reading {trace}"), opened() as traces:
        requests = sum(1 for _ in source.arrivals())
    for note in notes(traces):
        click.echo(note, err=True)
    if not requests:
        raise click.ClickException(f"{trace}: no request lies in what is to be replayed")
    endpoint = Endpoint(url, key, model, chat, exact)
    with _bar() as bar:
        task = bar.add_task("replay", total=requests)
        played = _run(
            play(
                source.arrivals(),
                endpoint,
                seed=seed,
                in_flight=max_in_flight,
                record=record,
                on_row=lambda _: bar.advance(task),
            )
        )
    _report(trace, url, seed, requests, played, as_json=as_json)
    if played.interrupted:
        sys.exit(Exit.INTERRUPTED)
    if not played.outcome.served:
        sys.exit(Exit.FAILED)


@dataclass(frozen=True)
class _Source:
    """The part of a trace that is replayed."""

    path: Path
    seed: int
    from_s: float
    to_s: float | None
    rate: float
    limit: int | None

    def arrivals(self) -> Iterator[Arrival]:
        part = slice_trace(arrivals_of(self.path, self.seed), self.from_s, self.to_s)
        return islice(scale_rate(part, rate=self.rate), self.limit)


def _capture(file: Path, url: str, for_s: float | None, as_json: bool) -> None:
    part = file.with_name(f"{file.name}.part")
    for path in (file, part):  # the second is left by a capture that was killed
        if path.exists():
            raise click.BadParameter(f"{path}: expected no such file yet", param_hint="--capture")
    until = "until Ctrl-C" if for_s is None else f"for {for_s:g} s, or until Ctrl-C"
    with part.open("wb") as spooled, Console(stderr=True).status("") as status:

        def changed() -> None:
            status.update(f"{spool.requests} requests")

        spool = CaptureFile(spooled, changed)
        click.echo(f"Capturing {url} {until}; a request is written when it has ended.", err=True)
        try:
            whole = _run(hear(url, spool, for_s=for_s))
        except BaseException:
            if not spool.header:
                part.unlink()
            raise
    in_order(part, file)
    part.unlink()
    if as_json:
        said = {"file": str(file), "requests": spool.requests, "lost": spool.lost, "whole": whole}
        click.echo(msgspec.json.encode(said).decode())
    else:
        click.echo(f"{spool.requests} requests are in {file}")
    if spool.lost:
        click.echo(f"tidegate: {spool.lost} more were lost: this machine did not keep up", err=True)
    if not whole:
        click.echo("tidegate: the gateway ended the capture", err=True)
        sys.exit(Exit.FAILED)


def _run(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def _bar() -> Progress:
    """How many requests are over, on standard error."""
    return moving(0, MofNCompleteColumn())


def _report(trace: Path, url: str, seed: int, requests: int, played: ReplayResult, *, as_json: bool) -> None:
    outcome, asking, fit = played.outcome, played.asking, played.fit
    if as_json:
        said = {
            "trace": str(trace), "url": url, "model": asking.model, "seed": seed, "requests": requests,
            **msgspec.to_builtins(outcome, str_keys=True),
            "exact": asking.exact, "tokens_per_word": fit.per_word, "interrupted": played.interrupted,
        }  # fmt: skip
        click.echo(msgspec.json.encode(said).decode())
        return
    click.echo(f"{trace.name} on {url}, model {asking.model}, seed {seed}")
    console().print(_table(outcome))
    took_s = outcome.duration_s
    click.echo(
        f"{outcome.served} of {outcome.sent} requests served in {took_s:.1f} s "
        f"({outcome.served / took_s:.2f}/s), {outcome.input_tokens} input and {outcome.output_tokens} "
        "output tokens"
    )
    for status, count in sorted(outcome.failed.items()):
        what = {0: "without an answer", 200: "with a broken answer"}.get(status, f"with status {status}")
        click.echo(f"{count} failed {what}")
    if outcome.error:
        click.echo(f"The first failure: {outcome.error}")
    if outcome.cut or played.interrupted:
        click.echo(f"Interrupted: {outcome.cut} were open, {requests - outcome.sent - outcome.cut} not sent.")
    if not asking.exact:
        click.echo("Answers had lengths of their own.")
    if not outcome.kept_pace:
        click.echo(
            f"tidegate: this client did not keep pace: {outcome.late} requests were sent more than "
            f"{1e3 * LATE_S:g} ms late, so that the load was another than the trace's",
            err=True,
        )


def _table(outcome: RequestResult) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("ms")
    rows = (
        ("TTFT", outcome.ttft_s),
        ("ITL", outcome.itl_s),
        ("E2E", outcome.e2e_s),
        ("sent late", outcome.late_s),
    )
    for column in ("mean", "p50", "p90", "p95", "p99", "max"):
        table.add_column(column, justify="right")
    for name, spread in rows:
        if spread is not None:
            table.add_row(name, *(f"{1e3 * value:.2f}" for value in msgspec.structs.astuple(spread)))
    return table
