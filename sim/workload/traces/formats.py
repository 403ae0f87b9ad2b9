"""The trace formats: Azure, BurstGPT, ServeGen, Mooncake and Tidegate's own captures.

A reader yields the requests of a file as arrivals. Requests without input or output tokens raise
:class:`policy.errors.TraceError`, except in BurstGPT, where they mark failed requests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from hashlib import blake2b
from typing import Annotated

import msgspec
from msgspec import Meta

from policy.wire.capture import CaptureLine, Hash, Tokens
from sim.arrivals import Arrival
from sim.workload.traces.record_readers import ElapsedSeconds, JsonLinesReader, TableReader

# github.com/Azure/AzurePublicDataset, 2023 and 2024.
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

# 2023 has 100 ns and no zone, 2024 microseconds and one.
_INSTANT = re.compile(
    r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:Z|([+-])(\d\d):(\d\d))?", re.ASCII
)
_NS = 1_000_000_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def read_azure(table: TableReader) -> Iterator[Arrival]:
    """The requests; Azure's all have input and output."""
    elapsed: ElapsedSeconds[int] = ElapsedSeconds(table.lines, _NS)
    for row in table:
        text = row[table.at["TIMESTAMP"]]
        instant = _nanoseconds(text)
        if instant is None:
            raise table.lines.refused(text, "an instant, as in 2023-11-16 18:15:46.6805900, in TIMESTAMP")
        yield Arrival(
            at=elapsed.since(instant, text),
            input_tokens=table.tokens(row, "ContextTokens"),
            output_tokens=table.tokens(row, "GeneratedTokens"),
        )


def _nanoseconds(text: str) -> int | None:
    match = _INSTANT.fullmatch(text)
    seconds = _seconds(match[1]) if match else None
    if match is None or seconds is None:
        return None
    if match[3]:
        zone = (int(match[4]) * 60 + int(match[5])) * 60
        seconds -= zone if match[3] == "+" else -zone
    return seconds * _NS + int((match[2] or "").ljust(9, "0"))


@lru_cache(maxsize=16)
def _seconds(text: str) -> int | None:
    """Seconds since 1970, or ``None`` for an invalid date; many rows share theirs."""
    try:
        return (datetime.fromisoformat(text).replace(tzinfo=UTC) - _EPOCH) // timedelta(seconds=1)
    except ValueError:
        return None


# github.com/HPMLL/BurstGPT; the third file adds "Session ID" and "Elapsed time".
BURSTGPT_COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens")
_SESSION = "Session ID"


def read_burstgpt(table: TableReader, skipped: Callable[[], None]) -> Iterator[Arrival]:
    """The answered requests; ``skipped`` is called for each without response tokens, which failed.

    The first instant is that of the first request, failed or not.
    """
    elapsed: ElapsedSeconds[float] = ElapsedSeconds(table.lines, 1)
    for row in table:
        at = elapsed.since(table.number(row, "Timestamp"), row[table.at["Timestamp"]])
        output = table.tokens(row, "Response tokens", least=0)
        prompt = table.tokens(row, "Request tokens", least=1 if output else 0)
        if not output:
            skipped()
            continue
        yield Arrival(
            at=at,
            input_tokens=prompt,
            output_tokens=output,
            model=row[table.at["Model"]],
            session=_session(row[table.at[_SESSION]]) if _SESSION in table.at else 0,
        )


def _session(name: str) -> int:
    """A stable hash of the session; 0 for none, as in requests to the API."""
    return int.from_bytes(blake2b(name.encode(), digest_size=7).digest(), "big") if name else 0


# github.com/alibaba/ServeGen; other columns are "request_id" and, for reasoning models, "reason_ratio".
SERVEGEN_COLUMNS = ("timestamp", "input_tokens", "output_tokens")


def read_servegen(table: TableReader) -> Iterator[Arrival]:
    """The requests of a workload that ServeGen saved as CSV."""
    elapsed: ElapsedSeconds[float] = ElapsedSeconds(table.lines, 1)
    for row in table:
        yield Arrival(
            at=elapsed.since(table.number(row, "timestamp"), row[table.at["timestamp"]]),
            input_tokens=table.tokens(row, "input_tokens"),
            output_tokens=table.tokens(row, "output_tokens"),
        )


class MooncakeLine(msgspec.Struct, frozen=True):
    """A request of Mooncake (github.com/kvcache-ai/Mooncake).

    ``timestamp`` is in milliseconds, ``hash_ids`` are of blocks of 512 tokens.
    """

    timestamp: Annotated[float, Meta(ge=0)]
    input_length: Tokens
    output_length: Tokens
    hash_ids: tuple[Hash, ...] = ()


def read_mooncake(objects: JsonLinesReader[MooncakeLine]) -> Iterator[Arrival]:
    """The requests; more blocks than the tokens fill are an error."""
    elapsed: ElapsedSeconds[float] = ElapsedSeconds(objects.lines, 1000)
    for line in objects:
        yield Arrival(
            at=elapsed.since(line.timestamp, line.timestamp),
            input_tokens=line.input_length,
            output_tokens=line.output_length,
            blocks=objects.blocks(line.hash_ids, line.input_length),
        )


def read_capture(objects: JsonLinesReader[CaptureLine]) -> Iterator[Arrival]:
    """The requests below the header of a capture."""
    elapsed: ElapsedSeconds[float] = ElapsedSeconds(objects.lines, 1)
    for line in objects:
        at, blocks = elapsed.since(line.at, line.at), objects.blocks(line.blocks, line.input_tokens)
        yield Arrival(*msgspec.structs.astuple(line))._replace(at=at, blocks=blocks)


def captured(arrival: Arrival) -> CaptureLine:
    """``arrival`` as a line of a capture."""
    return CaptureLine(**{name: getattr(arrival, name) for name in CaptureLine.__struct_fields__})
