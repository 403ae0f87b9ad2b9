"""The log of each request's outcome, returned as columns."""

from __future__ import annotations

import math
from array import array
from typing import Any

import numpy as np

from policy.config.control import ControlConfig
from policy.types import Priority
from sim.simulator.replica import SimulatedTicket
from sim.simulator.run_record import RequestColumns, RequestOutcome

# Token counts beyond a column of 32 bits are cut off.
_MOST_TOKENS = 2**31 - 1
# The columns of :class:`RequestColumns` with their types.
_COLUMNS = {
    "at": "d", "input_tokens": "i", "output_tokens": "i", "cached_tokens": "i", "outcome": "b",
    "queued_s": "d", "ttft_s": "d", "itl_s": "d", "e2e_s": "d", "replica": "i", "met": "b",
}  # fmt: skip


def _limit(target_s: float | None) -> float:
    return math.inf if target_s is None else target_s


class RequestLog:
    """One model's requests, 58 bytes each. Rows are numbered in the order of arrival."""

    def __init__(self, control: ControlConfig) -> None:
        slos = {priority: control.slo_of(priority) for priority in Priority}
        self._limits = {
            priority: (_limit(slo.ttft_p95_s), _limit(slo.itl_p95_s)) for priority, slo in slos.items()
        }
        self._columns: dict[str, array[Any]] = {name: array(kind) for name, kind in _COLUMNS.items()}

    def arrived(self, at: float, input_tokens: int, output_tokens: int) -> int:
        """Add a request, FAILED until :meth:`over` is called; returns the number of its row."""
        row = len(self._columns["at"])
        tokens = min(input_tokens, _MOST_TOKENS), min(output_tokens, _MOST_TOKENS)
        values = (at, *tokens, 0, RequestOutcome.FAILED, math.nan, math.nan, math.nan, math.nan, -1, False)
        for column, value in zip(self._columns.values(), values, strict=True):
            column.append(value)
        return row

    def over(self, row: int, ticket: SimulatedTicket, outcome: RequestOutcome, at: float) -> bool:
        """Record the end of a request; returns whether it was served within the SLO."""
        columns, came = self._columns, ticket.request.arrived
        columns["outcome"][row] = outcome
        columns["queued_s"][row] = (at if ticket.sent_at is None else ticket.sent_at) - came
        if ticket.runner is not None and outcome in (RequestOutcome.SERVED, RequestOutcome.FAILED):
            columns["replica"][row] = ticket.runner.span.number
        if ticket.first_at is None:
            return False
        columns["ttft_s"][row] = ttft_s = ticket.first_at - came
        if outcome is not RequestOutcome.SERVED:
            return False
        gap_s = ticket.gap_s(at)
        columns["cached_tokens"][row] = ticket.cached_tokens
        columns["e2e_s"][row] = at - came
        if ticket.arrival.output_tokens > 1:
            columns["itl_s"][row] = gap_s
        most_ttft_s, most_gap_s = self._limits[ticket.request.priority]
        columns["met"][row] = met = ttft_s <= most_ttft_s and gap_s <= most_gap_s
        return met

    def requests(self) -> RequestColumns:
        """All requests, in the log's own memory: no more may be added."""
        columns: dict[str, Any] = {name: np.asarray(column) for name, column in self._columns.items()}
        return RequestColumns(**columns | {"met": columns["met"].view(np.bool_)})
