"""What became of each request, written down as it happens and handed out as columns."""

from __future__ import annotations

import math
from array import array

import numpy as np

from policy.control import Objective
from sim.desk import Place
from sim.record import Outcome, Requests

_NAN = float("nan")


class Ledger:
    """One model's requests. Rows are numbered in the order of arrival."""

    def __init__(self, slo: Objective) -> None:
        self._most_ttft_s = math.inf if slo.ttft_p95_s is None else slo.ttft_p95_s
        self._most_gap_s = math.inf if slo.itl_p95_s is None else slo.itl_p95_s
        self._at = array("d")
        self._input = array("q")
        self._output = array("q")
        self._cached = array("q")
        self._outcome = array("q")
        self._queued = array("d")
        self._ttft = array("d")
        self._itl = array("d")
        self._e2e = array("d")
        self._replica = array("q")
        self._met = array("b")

    def arrived(self, at: float, input_tokens: int, output_tokens: int) -> int:
        """One more came; returns the number of its row."""
        row = len(self._at)
        self._at.append(at)
        self._input.append(input_tokens)
        self._output.append(output_tokens)
        # Whoever is neither served nor turned away at the end of a run was not served.
        self._outcome.append(Outcome.FAILED)
        self._cached.append(0)
        self._replica.append(-1)
        self._met.append(False)
        for times in (self._queued, self._ttft, self._itl, self._e2e):
            times.append(_NAN)
        return row

    def over(self, row: int, place: Place, outcome: Outcome, at: float) -> bool:
        """It has ended, one way or another; whether within the objective."""
        self._outcome[row] = outcome
        came = place.request.arrived
        self._queued[row] = (at if place.sent_at is None else place.sent_at) - came
        if place.runner is not None and outcome in (Outcome.SERVED, Outcome.FAILED):
            self._replica[row] = place.runner.span.number
        if place.first_at is not None:
            self._ttft[row] = place.first_at - came
        if outcome is Outcome.SERVED and place.first_at is not None:
            self._cached[row] = place.cached_tokens
            self._e2e[row] = at - came
            gap_s = place.gap_s(at)
            self._itl[row] = gap_s if place.arrival.output_tokens > 1 else _NAN
            self._met[row] = self._ttft[row] <= self._most_ttft_s and gap_s <= self._most_gap_s
        return bool(self._met[row])

    def requests(self) -> Requests:
        """All of them."""
        return Requests(
            at=np.array(self._at),
            input_tokens=np.array(self._input, dtype=np.int64),
            output_tokens=np.array(self._output, dtype=np.int64),
            cached_tokens=np.array(self._cached, dtype=np.int64),
            outcome=np.array(self._outcome, dtype=np.int64),
            queued_s=np.array(self._queued),
            ttft_s=np.array(self._ttft),
            itl_s=np.array(self._itl),
            e2e_s=np.array(self._e2e),
            replica=np.array(self._replica, dtype=np.int64),
            met=np.array(self._met, dtype=np.bool_),
        )
