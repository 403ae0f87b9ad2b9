"""A whole replay and a whole capture; Ctrl-C ends either with the results so far."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import msgspec

from policy.errors import Unreachable
from sim.arrivals import Arrival
from tidegate.replay.capture_to_trace import CaptureFile, CaptureRefused
from tidegate.replay.endpoint_api import RequestFormat, describe_error, models_of, probe
from tidegate.replay.http_client import ReplayConnectionPool
from tidegate.replay.player import TracePlayer
from tidegate.replay.prompts import PromptGenerator, TokensPerWordFit
from tidegate.replay.results import ReplayRow, ReplayStatistics, RequestResult

# Descriptors beside those of the connections.
_OTHER_DESCRIPTORS = 64


@dataclass(frozen=True)
class ReplayResult:
    """The request format, the tokens per word and the outcome of a replay."""

    request_format: RequestFormat
    fit: TokensPerWordFit
    outcome: RequestResult
    interrupted: bool


async def replay(
    arrivals: Iterable[Arrival],
    pool: ReplayConnectionPool,
    request_format: RequestFormat,
    *,
    seed: int,
    in_flight: int,
    record: Path | None,
    on_row: Callable[[ReplayRow], None],
) -> ReplayResult:
    """Play ``arrivals`` over ``pool``, which is closed at the end; ``record`` gets a line for each request.

    Without a model in ``request_format``, requests name that of the trace, or the first that the endpoint
    lists. Raises :class:`policy.errors.Unreachable` and ``EndpointRefused`` before the first request.
    """
    try:
        if not request_format.model:
            listed = await models_of(pool)
            request_format = replace(request_format, model=listed[0], others=frozenset(listed))
        request_format, fit = await probe(pool, request_format, seed)
        tally = ReplayStatistics()
        with record.open("wb") if record is not None else nullcontext() as file:

            def record_row(row: ReplayRow) -> None:
                tally.add(row)
                if file is not None:
                    file.write(msgspec.json.encode(row) + b"\n")
                on_row(row)

            player = TracePlayer(
                pool,
                request_format,
                PromptGenerator(seed, fit),
                in_flight=_connection_limit(in_flight),
                on_row=record_row,
            )
            began = perf_counter()
            with stopped_by_signals(player.stop) as interrupted:
                await player.play(arrivals)
            outcome = tally.outcome(cut=player.cut, duration_s=perf_counter() - began)
        return ReplayResult(request_format, fit, outcome, bool(interrupted))
    finally:
        pool.close()


async def capture(url: str, token: str, spool: CaptureFile, *, for_s: float | None) -> bool:
    """Capture the gateway with the admin port at ``url`` until a signal, or for ``for_s`` seconds.

    Returns whether this side ended it. Raises :class:`policy.errors.Unreachable` and
    :class:`tidegate.replay.capture_to_trace.CaptureRefused`.
    """
    pool = ReplayConnectionPool(url, token)
    receiving = asyncio.create_task(pool.get("/admin/capture", spool))
    try:
        with stopped_by_signals(receiving.cancel):
            await asyncio.wait([receiving], timeout=for_s)
        if not receiving.done():
            receiving.cancel()
            await asyncio.wait([receiving])
        if receiving.cancelled():
            if not spool.header:
                raise Unreachable(f"{url} did not begin a capture before its end")
            return True
        status = receiving.result()
    except OSError as error:
        if spool.header:
            return False
        raise Unreachable(f"{url} does not answer: {describe_error(error)}") from None
    finally:
        pool.close()
    if not spool.header:
        expected = "its token in TIDEGATE_ADMIN_TOKEN" if status == 401 else "a gateway's admin port"
        raise CaptureRefused(f"{url}/admin/capture answered {status}: expected {expected}")
    return False


@contextlib.contextmanager
def stopped_by_signals(stop: Callable[[], object]) -> Iterator[list[int]]:
    """Call ``stop`` on Ctrl-C and SIGTERM; yields the list of received signals."""
    loop = asyncio.get_running_loop()
    received: list[int] = []

    def on_signal(number: int) -> None:
        received.append(number)
        stop()

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield received
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _connection_limit(in_flight: int) -> int:
    """``in_flight``, or the maximum that the limit on open files allows; raises the soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = in_flight + _OTHER_DESCRIPTORS
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(min(in_flight, wanted - _OTHER_DESCRIPTORS), 1)
