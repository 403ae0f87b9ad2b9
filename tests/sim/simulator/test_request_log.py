"""The request log stores columns, and returns them without a second copy."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from policy.config.control import ControlConfig
from sim.simulator.request_log import RequestLog
from sim.simulator.run_record import RequestColumns, RequestOutcome

REQUESTS = 50_000
# The bytes of the columns per request, and the spare room of a growing buffer.
BYTES = 58
SPARE = 1.2


@pytest.mark.slow
def test_a_request_takes_few_bytes_also_while_all_are_read() -> None:
    tracemalloc.start()
    try:
        ledger = RequestLog(ControlConfig())
        for number in range(REQUESTS):
            ledger.arrived(float(number), 1000, 100)
        table = ledger.requests()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(table) == REQUESTS and peak < SPARE * BYTES * REQUESTS
    columns = [getattr(table, name) for name in RequestColumns.__slots__]
    assert sum(column.itemsize for column in columns) == BYTES


def test_a_request_without_an_end_is_not_served() -> None:
    ledger = RequestLog(ControlConfig())
    assert (ledger.arrived(0.5, 7, 8), ledger.arrived(1.5, 10_000_000, 9)) == (0, 1)
    table = ledger.requests()
    assert table.at.tolist() == [0.5, 1.5]
    assert table.input_tokens.tolist() == [7, 10_000_000] and table.output_tokens.tolist() == [8, 9]
    assert table.cached_tokens.tolist() == [0, 0] and table.replica.tolist() == [-1, -1]
    assert (
        (table.outcome == RequestOutcome.FAILED).all() and not table.met.any() and table.met.dtype == np.bool_
    )
    for times in (table.queued_s, table.ttft_s, table.itl_s, table.e2e_s):
        assert np.isnan(times).all()


def test_lengths_beyond_the_column_type_are_clipped() -> None:
    ledger = RequestLog(ControlConfig())
    ledger.arrived(0.0, 10_000_000_000, 10_000_000_000)
    table = ledger.requests()
    assert table.input_tokens.tolist() == table.output_tokens.tolist() == [2**31 - 1]


def test_without_requests_the_table_is_empty() -> None:
    assert len(RequestLog(ControlConfig()).requests()) == 0
