"""Exemplars: the newest request of each bucket, by its trace or its id, over all workers."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from gateway.telemetry.exemplars import MAX_ID, Exemplar, ExemplarStore, shown

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.mark.parametrize(
    ("traceparent", "label", "name"),
    [
        (f"00-{TRACE}-00f067aa0ba902b7-01".encode(), "trace_id", TRACE),
        (f"01-{TRACE}-00f067aa0ba902b7-01-later".encode(), "trace_id", TRACE),
        (None, "request_id", "r-1"),
        (b"", "request_id", "r-1"),
        (b"00-%b-00f067aa0ba902b7-01" % (b"0" * 32), "request_id", "r-1"),
        (TRACE.encode(), "request_id", "r-1"),
    ],
)
def test_a_request_is_named_by_its_trace_or_its_id(traceparent: bytes | None, label: str, name: str) -> None:
    exemplar = shown("ttft", "m", 3, (0.5, 10.0, b"r-1", traceparent), 1000.0)
    assert exemplar == Exemplar("ttft", "m", 3, label, name, 0.5, 1010.0)


def test_an_id_that_openmetrics_does_not_allow_is_left_out() -> None:
    assert shown("ttft", "m", 3, (0.5, 10.0, b"x" * MAX_ID, None), 0.0) is not None
    assert shown("ttft", "m", 3, (0.5, 10.0, b"x" * (MAX_ID + 1), None), 0.0) is None


def test_the_newest_of_all_workers_counts(tmp_path: Path) -> None:
    store = ExemplarStore(tmp_path, 0.0)
    store.take("ttft", "m", {1: (0.1, 10.0, b"old", None), 2: (0.2, 30.0, b"new", None)})
    others = [Exemplar("ttft", "m", bucket, "request_id", "other", 0.1, 20.0) for bucket in (1, 2, 3)]
    written = tmp_path / f"exemplars_{os.getppid()}.json"  # of a process that lives
    written.write_bytes(msgspec.json.encode(others))
    dead = tmp_path / "exemplars_4194305.json"
    dead.write_bytes(written.read_bytes())
    assert {key[2]: exemplar.id for key, exemplar in store.all().items()} == {
        1: "other",
        2: "new",
        3: "other",
    }
    assert not dead.exists()


def test_what_one_worker_writes_another_reads(tmp_path: Path) -> None:
    store = ExemplarStore(tmp_path, 0.0)
    store.take("ttft", "m", {1: (0.1, 10.0, b"mine", None)})
    store.write()
    (path,) = tmp_path.iterdir()
    path.rename(tmp_path / f"exemplars_{os.getppid()}.json")
    assert [exemplar.id for exemplar in ExemplarStore(tmp_path, 0.0).all().values()] == ["mine"]
