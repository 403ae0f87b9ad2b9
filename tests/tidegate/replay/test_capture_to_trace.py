"""A capture becomes a trace, sorted by time, with the number of lost requests."""

from __future__ import annotations

import json
from io import BytesIO
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.workload.traces.detect_format import open_trace
from tidegate.replay.capture_to_trace import CaptureFile, CaptureRefused, in_order

HEADER = b'{"tidegate":"capture","version":1,"block_tokens":512}\n'


def line(at: float) -> bytes:
    return json.dumps({"at": at, "input_tokens": 5, "output_tokens": 2}).encode() + b"\n"


@settings(max_examples=25)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=20))
def test_lines_are_sorted_by_time(tmp_path_factory: pytest.TempPathFactory, instants: list[int]) -> None:
    folder = tmp_path_factory.mktemp("capture")
    part, target = folder / "part", folder / "target"
    part.write_bytes(HEADER + b"".join(map(line, instants)) + b'{"at":3,"input')  # killed while writing
    in_order(part, target)
    assert [arrival.at for arrival in open_trace(target)] == [at - min(instants) for at in sorted(instants)]
    assert sorted(path.name for path in folder.iterdir()) == ["part", "target"]


@settings(max_examples=25)
@given(st.lists(st.integers(0, 200), max_size=6))
def test_any_split_of_the_bytes_gives_the_same_result(cuts: list[int]) -> None:
    reported = HEADER + line(4) + b'{"lost":2}\n' + line(1)
    part, changes = BytesIO(), [0]
    spool = CaptureFile(part, lambda: changes.append(1))
    edges = [0, *sorted(min(cut, len(reported)) for cut in cuts), len(reported)]
    for begin, end in pairwise(edges):
        spool.feed(reported[begin:end], 0.0)
    assert part.getvalue() == HEADER + line(4) + line(1)
    assert (spool.requests, spool.lost) == (2, 2)
    assert len(changes) == len(edges)


def test_a_line_that_says_that_the_capture_goes_on_is_no_request() -> None:
    part = BytesIO()
    spool = CaptureFile(part, lambda: None)
    spool.feed(HEADER + b'{"lost":0}\n' + line(4) + b'{"lost":0}\n', 0.0)
    assert (part.getvalue(), spool.requests, spool.lost) == (HEADER + line(4), 1, 0)


@pytest.mark.parametrize("message", [b'{"error": {"message": "no"}}\n', b"<html>\n", line(1)])
def test_other_content_than_a_capture_is_refused(message: bytes) -> None:
    with pytest.raises(CaptureRefused, match=r"no (line of a )?capture"):
        CaptureFile(BytesIO(), lambda: None).feed(message, 0.0)
