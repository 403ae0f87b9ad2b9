"""A summary counts every request once, and has no number where there is none."""

from __future__ import annotations

import json

import msgspec
import pytest

from sim.results.comparison import summarise
from sim.twin.record import Outcome, Record
from tests.sim.records import NAN, decision, record, requests

MIXED = (Outcome.SERVED, Outcome.SERVED, Outcome.REFUSED, Outcome.EXPIRED, Outcome.FAILED, Outcome.OVERFLOWN)


def test_every_outcome_is_counted_and_what_nobody_answered_has_failed() -> None:
    table = requests(
        range(6),
        [0.1, 0.3, NAN, NAN, NAN, 0.2],
        outcome=MIXED,
        met=[True, False, False, False, False, True],
    )
    found = summarise(Record(ends_at=4.0, requests={"m": table}, decisions=[(1.0, decision(1, 2, "more"))]))
    assert (found.requests, found.failed, found.refused, found.expired, found.overflown) == (6, 3, 1, 1, 1)
    assert found.attainment == pytest.approx(2 / 6)
    assert found.goodput_rps == pytest.approx(2 / 4)
    assert found.ttft_p50_s == pytest.approx(0.2) and found.e2e_p50_s == pytest.approx(0.4)
    assert found.decisions == 1


def test_models_are_taken_together() -> None:
    one, other = requests([0.0, 1.0, 2.0], [0.1] * 3), requests([0.5], [0.9], met=[False])
    found = summarise(Record(ends_at=3.0, requests={"one": one, "other": other}))
    assert found.requests == 4 and found.attainment == pytest.approx(0.75)
    assert found.ttft_p50_s == pytest.approx(0.1) and found.ttft_p99_s == pytest.approx(0.876)


def test_gpu_seconds_are_hours_and_stand_beside_the_bound() -> None:
    found = summarise(record(), lower_gpu_hours=0.8)
    assert found.gpu_hours == pytest.approx(1.0) and found.oracle_ratio == pytest.approx(1.25)
    assert summarise(record()).oracle_ratio is None


@pytest.mark.parametrize("served", [[], [NAN, NAN]])
def test_where_nothing_was_served_there_is_no_number(served: list[float]) -> None:
    outcome = [Outcome.REFUSED] * len(served)
    table = requests(range(len(served)), served, outcome=outcome, met=[False] * len(served))
    found = summarise(Record(ends_at=0.0, requests={"m": table}))
    assert found.attainment == (0.0 if served else None)
    assert (found.ttft_p50_s, found.itl_p95_s, found.e2e_p99_s, found.goodput_rps) == (None, None, None, 0.0)
    # Strict JSON: a NaN would be no number there either.
    said = json.loads(msgspec.json.encode(found), parse_constant=pytest.fail)
    assert said["ttft_p99_s"] is None
