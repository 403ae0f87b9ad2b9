"""``replay``: send a trace to an endpoint, or capture live traffic as a trace."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import click
import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from sim.arrivals import Arrival
from sim.workload.traces.detect_format import notes, opened
from sim.workload.transforms import scale_rate, slice_trace
from sim.workload.workload_spec import arrivals_of
from store.state_dir import StateDir
from tidegate.commands.deployment_context import admin_token
from tidegate.commands.options import (
    OutputFile,
    Url,
    as_json,
    key_option,
    rate_option,
    seed_option,
    slice_options,
)
from tidegate.commands.terminal import ProgressBar, console, print_json, table_of_rows, warn
from tidegate.commands.units import duration, plural
from tidegate.exit_codes import ExitCode
from tidegate.replay.capture_to_trace import CaptureFile, in_order
from tidegate.replay.endpoint_api import RequestFormat
from tidegate.replay.http_client import ReplayConnectionPool
from tidegate.replay.replay_and_capture import ReplayResult
from tidegate.replay.replay_and_capture import capture as capture_traffic
from tidegate.replay.replay_and_capture import replay as send_trace
from tidegate.replay.results import LATE_S, RequestResult


@click.command(
    help="Send the requests of TRACE, or of a YAML workload, to an endpoint at the times of the trace, and "
    "report the latencies. Prompts are synthetic, with the lengths and shared prefixes of the trace.\n\n"
    "With --capture, record live traffic of a gateway as a trace: timings, lengths, adapters and prefix "
    "hashes, no prompts."
)
@click.argument("trace", required=False, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--url", type=Url(), default="http://127.0.0.1:8080", show_default=True, help="The endpoint.")
@click.option("--model", default="", help="Model to request; default: the trace's, or the endpoint's first.")
@key_option
@click.option("--chat", is_flag=True, help="Use /v1/chat/completions instead of /v1/completions.")
@click.option(
    "--exact/--own-lengths",
    default=True,
    help="Force the trace's answer lengths (ignore_eos, min_tokens) if the endpoint supports it.",
)
@rate_option
@slice_options("before")
@click.option("--limit", type=click.IntRange(min=1), help="Maximum number of requests.")
@click.option(
    "--max-in-flight", type=click.IntRange(1, 60_000), default=4096, show_default=True,
    help="Maximum concurrent requests; later ones are delayed (and reported as late).",
)  # fmt: skip
@seed_option(default=None, note=" of prompts and workloads; default: a new one each time")
@click.option("--record", type=OutputFile(), help="Write one line of JSON per request to this file.")
@click.option("--capture", type=OutputFile(), help="Capture a trace to this file instead of replaying one.")
@click.option(
    "--admin-url", type=Url(), default="http://127.0.0.1:8081", show_default=True,
    help="With --capture: the gateway's admin port; TIDEGATE_ADMIN_TOKEN is its token on another machine.",
)  # fmt: skip
@click.option(
    "--for", "for_s", metavar="DURATION", type=duration, help="Stop the capture after e.g. 90s, 30m or 2h."
)
@as_json
@click.pass_obj
def replay(
    state: StateDir,
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
        raise click.UsageError("give either a TRACE to replay or --capture FILE")
    if capture is not None:
        _capture(capture, admin_url, admin_token(state, admin_url), for_s, as_json)
        return
    if for_s is not None:
        raise click.UsageError("--for is only for --capture: end a replay with --to-s")
    assert trace is not None
    seed = secrets.randbits(32) if seed is None else seed

    def arrivals() -> Iterator[Arrival]:
        part = slice_trace(arrivals_of(trace, seed), from_s, to_s)
        return islice(scale_rate(part, rate=rate), limit)

    # A complete first pass, so that an invalid line is reported before a request is sent.
    with Console(stderr=True).status(f"reading {trace}"), opened() as traces:
        requests = sum(1 for _ in arrivals())
    for note in notes(traces):
        warn(note)
    if not requests:
        raise click.ClickException(f"{trace}: no requests in the selected part")
    with ProgressBar("requests") as bar:
        result = uvloop.run(
            send_trace(
                arrivals(),
                ReplayConnectionPool(url, key),
                RequestFormat(model, chat=chat, exact=exact),
                seed=seed,
                in_flight=max_in_flight,
                record=record,
                on_row=partial(bar.advance, requests, "replay"),
            )
        )
    _report(trace, url, seed, requests, result, as_json=as_json)
    if result.interrupted:
        sys.exit(ExitCode.INTERRUPTED)
    if not result.outcome.served:
        sys.exit(ExitCode.FAILED)


def _capture(file: Path, url: str, token: str, for_s: float | None, as_json: bool) -> None:
    part = file.with_name(f"{file.name}.part")
    for path in (file, part):  # the second one is left by a capture that was killed
        if path.exists():
            raise click.BadParameter(f"{path}: the file exists already", param_hint="--capture")
    until = "until Ctrl-C" if for_s is None else f"for {for_s:g} s, or until Ctrl-C"
    with part.open("wb") as spooled, Console(stderr=True).status("") as status:

        def changed() -> None:
            status.update(f"{spool.requests} requests")

        spool = CaptureFile(spooled, changed)
        warn(f"Capturing {url} {until}. Requests are written when they end.")
        try:
            complete = uvloop.run(capture_traffic(url, token, spool, for_s=for_s))
        except BaseException:
            if not spool.header:
                part.unlink()
            raise
    in_order(part, file)
    part.unlink()
    if as_json:
        print_json({"file": str(file), "requests": spool.requests, "lost": spool.lost, "whole": complete})
    else:
        click.echo(f"{plural(spool.requests, 'request')} written to {file}")
    if spool.lost:
        warn(f"tidegate: {spool.lost} more requests were lost: this machine was too slow")
    if not complete:
        warn("tidegate: the gateway ended the capture")
        sys.exit(ExitCode.FAILED)


def _report(trace: Path, url: str, seed: int, requests: int, result: ReplayResult, *, as_json: bool) -> None:
    outcome, request, fit = result.outcome, result.request_format, result.fit
    if as_json:
        print_json(
            {
                "trace": str(trace), "url": url, "model": request.model, "seed": seed, "requests": requests,
                **msgspec.to_builtins(outcome, str_keys=True),
                "exact": request.exact, "tokens_per_word": fit.per_word, "interrupted": result.interrupted,
            }
        )  # fmt: skip
        return
    click.echo(f"{trace.name} on {url}, model {request.model}, seed {seed}")
    console().print(_latencies(outcome))
    duration_s = outcome.duration_s
    click.echo(
        f"{outcome.served} of {outcome.sent} requests served in {duration_s:.1f} s "
        f"({outcome.served / duration_s:.2f}/s), {outcome.input_tokens} input and {outcome.output_tokens} "
        "output tokens"
    )
    for status, count in sorted(outcome.failed.items()):
        cause = {0: "without an answer", 200: "with an incomplete answer"}.get(
            status, f"with status {status}"
        )
        click.echo(f"{count} failed {cause}")
    if outcome.error:
        click.echo(f"First failure: {outcome.error}")
    if outcome.cut or result.interrupted:
        unsent = requests - outcome.sent - outcome.cut
        click.echo(f"Interrupted: {outcome.cut} requests in flight, {unsent} not sent.")
    if not request.exact:
        click.echo("Answer lengths are the model's own, not the trace's.")
    if not outcome.kept_pace:
        warn(
            f"tidegate: this client was too slow: {outcome.late} requests were sent more than "
            f"{1e3 * LATE_S:g} ms late, so the load differs from the trace"
        )


def _latencies(outcome: RequestResult) -> Table:
    spreads = {
        "TTFT": outcome.ttft_s, "ITL": outcome.itl_s, "E2E": outcome.e2e_s, "sent late": outcome.late_s,
    }  # fmt: skip
    return table_of_rows(
        ("ms", ">mean", ">p50", ">p90", ">p95", ">p99", ">max"),
        (
            (name, *(f"{1e3 * value_s:.2f}" for value_s in msgspec.structs.astuple(spread)))
            for name, spread in spreads.items()
            if spread is not None
        ),
    )
