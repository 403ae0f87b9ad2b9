"""What became of each request, written down as it happens and handed out as columns."""

from __future__ import annotations

import math
from array import array

import numpy as np

from policy.config.control import SloConfig
from sim.twin.gateway import TwinTicket
from sim.twin.record import Outcome, Requests

_NAN = float("nan")
# No engine takes more tokens than a column of 32 bits holds.
_MOST_TOKENS = 2**31 - 1


class RequestLog:
    """One model's requests, 58 bytes each. Rows are numbered in the order of arrival."""

    def __init__(self, slo: SloConfig) -> None:
        self._most_ttft_s = math.inf if slo.ttft_p95_s is None else slo.ttft_p95_s
        self._most_gap_s = math.inf if slo.itl_p95_s is None else slo.itl_p95_s
        self._at = array("d")
        self._input = array("i")
        self._output = array("i")
        self._cached = array("i")
        self._outcome = array("b")
        self._queued = array("d")
        self._ttft = array("d")
        self._itl = array("d")
        self._e2e = array("d")
        self._replica = array("i")
        self._met = array("b")

    def arrived(self, at: float, input_tokens: int, output_tokens: int) -> int:
        """One more came; returns the number of its row."""
        row = len(self._at)
        self._at.append(at)
        self._input.append(min(input_tokens, _MOST_TOKENS))
        self._output.append(min(output_tokens, _MOST_TOKENS))
        # Whoever is neither served nor turned away at the end of a run was not served.
        self._outcome.append(Outcome.FAILED)
        self._cached.append(0)
        self._replica.append(-1)
        self._met.append(False)
        for times in (self._queued, self._ttft, self._itl, self._e2e):
            times.append(_NAN)
        return row

    def over(self, row: int, ticket: TwinTicket, outcome: Outcome, at: float) -> bool:
        """It has ended, one way or another; whether within the SLO."""
        self._outcome[row] = outcome
        came = ticket.request.arrived
        self._queued[row] = (at if ticket.sent_at is None else ticket.sent_at) - came
        if ticket.runner is not None and outcome in (Outcome.SERVED, Outcome.FAILED):
            self._replica[row] = ticket.runner.span.number
        if ticket.first_at is not None:
            self._ttft[row] = ticket.first_at - came
        if outcome is Outcome.SERVED and ticket.first_at is not None:
            self._cached[row] = ticket.cached_tokens
            self._e2e[row] = at - came
            gap_s = ticket.gap_s(at)
            self._itl[row] = gap_s if ticket.arrival.output_tokens > 1 else _NAN
            self._met[row] = self._ttft[row] <= self._most_ttft_s and gap_s <= self._most_gap_s
        return bool(self._met[row])

    def requests(self) -> Requests:
        """All of them, in the ledger's own memory: nothing can come after this."""
        return Requests(
            at=np.asarray(self._at),
            input_tokens=np.asarray(self._input),
            output_tokens=np.asarray(self._output),
            cached_tokens=np.asarray(self._cached),
            outcome=np.asarray(self._outcome),
            queued_s=np.asarray(self._queued),
            ttft_s=np.asarray(self._ttft),
            itl_s=np.asarray(self._itl),
            e2e_s=np.asarray(self._e2e),
            replica=np.asarray(self._replica),
            met=np.asarray(self._met).view(np.bool_),
        )
