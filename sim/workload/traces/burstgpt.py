"""BurstGPT's traces (github.com/HPMLL/BurstGPT), with and without sessions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import blake2b

from sim.arrival import Arrival
from sim.workload.traces.reader import Elapsed, Table

# The third file adds "Session ID" and "Elapsed time".
COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens")
_SESSION = "Session ID"


def read(table: Table, skipped: Callable[[], None]) -> Iterator[Arrival]:
    """The requests that were answered: without response tokens they failed, and ``skipped`` is called.

    The first instant is that of the first request, whether it failed or not.
    """
    elapsed: Elapsed[float] = Elapsed(table.lines, 1)
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
    """The same number for the same name, on every machine; 0 for none, as requests to the API have."""
    return int.from_bytes(blake2b(name.encode(), digest_size=7).digest(), "big") if name else 0
