"""Traces of every format: the requests that are read, and errors with their line."""

from __future__ import annotations

import gzip
import os
import tracemalloc
from itertools import pairwise
from pathlib import Path

import pytest

from policy.errors import ConfigError, TraceError
from policy.wire.capture import BLOCK_TOKENS
from sim.arrivals import Arrival
from sim.workload.traces.detect_format import notes, open_trace, opened
from sim.workload.traces.record_readers import MAX_LINE_BYTES

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
SERVEGEN = "request_id,timestamp,input_tokens,output_tokens\n"
CAPTURE = '{"tidegate": "capture", "version": 1, "block_tokens": 512}\n'


def write(folder: Path, text: str | bytes, name: str = "trace") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def refused(folder: Path, text: str | bytes, name: str = "trace") -> TraceError:
    with pytest.raises(TraceError) as caught:
        list(open_trace(write(folder, text, name)))
    assert str(caught.value).startswith(f"{folder / name}:{caught.value.line}: got ")
    return caught.value


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        # 2023 has ticks of 100 ns, 2024 a zone.
        (
            AZURE + "2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:46.6805901,396,109",
            "azure",
            [Arrival(0.0, 374, 44), Arrival(1e-7, 396, 109)],
        ),
        (
            AZURE + "2024-05-10 23:59:59.009930+00:00,2162,5\n2024-05-11 00:00:00+00:00,7,8\n"
            "2024-05-11T02:00:01+02:00,1,1\n",
            "azure",
            [Arrival(0.0, 2162, 5), Arrival(0.99007, 7, 8), Arrival(1.99007, 1, 1)],
        ),
        (
            SERVEGEN + '0,0.53,143,20\n1,0.78,"15",7\n',
            "servegen",
            [Arrival(0.0, 143, 20), Arrival(0.25, 15, 7)],
        ),
        (
            '{"timestamp": 27000, "input_length": 513, "output_length": 6, "hash_ids": [46, 47]}\n'
            '{"timestamp": 27500, "input_length": 700, "output_length": 1, "hash_ids": [46], "more": 1}\n',
            "mooncake",
            [Arrival(0.0, 513, 6, blocks=(46, 47)), Arrival(0.5, 700, 1, blocks=(46,))],
        ),
        (
            CAPTURE + '{"at": 7.5, "input_tokens": 513, "output_tokens": 1, "model": "m", "adapter": "a",'
            ' "tenant": "t", "session": 3, "blocks": [9, 8]}\n'
            '{"at": 8, "input_tokens": 1, "output_tokens": 2}\n',
            "capture",
            [Arrival(0.0, 513, 1, "m", "a", "t", 3, (9, 8)), Arrival(0.5, 1, 2)],
        ),
    ],
)
def test_each_format_is_detected(tmp_path: Path, text: str, name: str, expected: list[Arrival]) -> None:
    trace = open_trace(write(tmp_path, text))
    assert (trace.format, list(trace)) == (name, expected)


def test_burstgpt_skips_failed_requests(tmp_path: Path) -> None:
    text = (
        BURST
        + "5,ChatGPT,472,0,472,Conversation log\n45,ChatGPT,1087,230,1317,API log\n45.5,GPT-4,9,1,10,x\n"
    )
    trace = open_trace(write(tmp_path, text))
    assert list(trace) == [Arrival(40.0, 1087, 230, "ChatGPT"), Arrival(40.5, 9, 1, "GPT-4")]
    assert (trace.format, trace.skipped) == ("burstgpt", 1)


def test_burstgpt_with_sessions_keeps_turns_together(tmp_path: Path) -> None:
    header = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    rows = "10.0,a-b,43,GPT-4,906,446,1352,c\n11.0,,2,GPT-4,3,4,7,c\n12.0,a-b,2,GPT-4,36.0,29,65,c\n"
    one, none, again = open_trace(write(tmp_path, header + rows))
    assert one.session == again.session > 0 == none.session
    assert again == Arrival(2.0, 36, 29, "GPT-4", session=one.session)


def test_a_compressed_trace_and_one_with_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    text = AZURE + "2023-11-16 18:15:46,374,44\n\n\n"
    packed = write(tmp_path, gzip.compress(text.encode()), "trace.csv.gz")
    marked = write(tmp_path, b"\xef\xbb\xbf" + text.encode())
    assert list(open_trace(packed)) == list(open_trace(marked)) == [Arrival(0.0, 374, 44)]


GOOD = "2023-11-16 18:15:46.6805900,374,44\n"
MOON = '{"timestamp": 1, "input_length": 600, "output_length": 6, "hash_ids": [1, 2]}\n'


@pytest.mark.parametrize(
    ("text", "line", "value", "expected"),
    [
        ("", 1, "", "a trace that is not empty"),
        ("when,what\n", 1, "when,what", "TIMESTAMP,ContextTokens,GeneratedTokens; Timestamp,Model"),
        ("TIMESTAMP,ContextTokens\n", 1, "TIMESTAMP,ContextTokens", "azure's column GeneratedTokens"),
        ("Timestamp,Model,Request tokens\n", 1, "Timestamp,Model,Request tokens", "burstgpt's column Resp"),
        ("request_id,timestamp,text_tokens\n", 1, "request_id,timestamp,text_tokens", "column input_tokens"),
        (AZURE.replace("\n", ",TIMESTAMP\n"), 1, AZURE[:-1] + ",TIMESTAMP", "different names"),
        (AZURE + GOOD + "2023-11-16 18:15:47,3", 3, "2023-11-16 18:15:47,3", "3 values: TIMESTAMP"),
        (AZURE + GOOD + "2023-11-16 18:15:45,3,4\n", 3, "2023-11-16 18:15:45", "not before"),
        (AZURE + GOOD + "2023-13-16 18:15:45,3,4\n", 3, "2023-13-16 18:15:45", "an instant"),
        (AZURE + "46.68,3,4\n", 2, "46.68", "an instant"),
        (AZURE + GOOD + GOOD.replace("374", "-374"), 3, "-374", "1..10000000, in ContextTokens"),
        (AZURE + GOOD.replace("44", "0"), 2, "0", "in GeneratedTokens"),
        (AZURE + GOOD.replace("44", "nan"), 2, "nan", "in GeneratedTokens"),
        (AZURE + GOOD.replace("44", "4.5"), 2, "4.5", "a whole number"),
        (AZURE + GOOD.replace("44", "4_4"), 2, "4_4", "a whole number"),
        (AZURE + GOOD.replace("44", ""), 2, "", "a whole number"),
        (AZURE + GOOD.replace("44", "1e9"), 2, "1e9", "a whole number"),
        (AZURE + GOOD + "\n" + GOOD, 3, "", "a line that is not empty"),
        (AZURE.encode() + b"\xff\n", 2, "byte 0", "UTF-8"),
        (AZURE + "1" * (MAX_LINE_BYTES + 1), 2, f"over {MAX_LINE_BYTES} bytes", "a line"),
        ('"TIMESTAMP",' + '"' + "x" * 200_000 + '"\n', 1, None, "a header with the columns"),
        (BURST + "-5,m,1,1,2,x\n", 2, "-5", "at least 0 in Timestamp"),
        (BURST + "5,m,0,1,2,x\n", 2, "0", "in Request tokens"),
        (BURST + "inf,m,1,1,2,x\n", 2, "inf", "in Timestamp"),
        (BURST + "1e999,m,1,1,2,x\n", 2, "1e999", "in Timestamp"),
        (BURST + "5,m,1,-1,2,x\n", 2, "-1", "in Response tokens"),
        (BURST + "5,m,-7,0,2,x\n", 2, "-7", "0..10000000, in Request tokens"),
        (SERVEGEN + "0,5,1,1\n1,4,1,1\n", 3, "4", "not before"),
        (SERVEGEN + "0,5,1,0\n", 2, "0", "in output_tokens"),
        (MOON + MOON[:40], 2, MOON[:40], "an object of this format"),
        (MOON + MOON.replace("1,", "0,", 1), 2, 0.0, "not before"),
        (MOON.replace("6,", "0,"), 1, None, "Expected `int` >= 1"),
        (MOON.replace("600", "-600"), 1, None, "Expected `int` >= 1"),
        (MOON.replace("600", "NaN"), 1, None, "invalid character"),
        (MOON.replace("600", "512"), 1, "2 hashes", "at most 1, one for each 512 of 512"),
        (MOON.replace('"output_length": 6, ', ""), 1, None, "missing required field `output_length`"),
        ('{"when": 1}\n', 1, '{"when": 1}', "Mooncake's keys"),
        ("{\n", 1, "{", "an object of this format"),
        (CAPTURE.replace("1,", "2,"), 1, None, "Invalid enum value 2 - at `$.version`"),
        (CAPTURE.replace("512", "16"), 1, None, "at `$.block_tokens`"),
        (CAPTURE + '{"at": 0, "input_tokens": 1}\n', 2, None, "`output_tokens`"),
        (CAPTURE + '{"at": 0, "input_tokens": 1, "output_tokens": 1, "text": "x"}\n', 2, None, "`text`"),
        (CAPTURE + '{"at": -1, "input_tokens": 1, "output_tokens": 1}\n', 2, None, ">= 0.0"),
        (CAPTURE + "[1]\n", 2, "[1]", "got `array`"),
    ],
)
def test_an_invalid_row_is_refused_with_its_line(
    tmp_path: Path, text: str | bytes, line: int, value: object, expected: str
) -> None:
    error = refused(tmp_path, text)
    assert error.line == line and expected in error.expected
    if value is not None:
        assert error.value == value


def test_a_long_line_is_truncated_in_the_error(tmp_path: Path) -> None:
    assert len(str(refused(tmp_path, "x" * 10_000).value)) < 100


@pytest.mark.parametrize("cut", [5, 20])
def test_a_truncated_compressed_trace_is_refused(tmp_path: Path, cut: int) -> None:
    packed = gzip.compress((AZURE + GOOD).encode())
    assert refused(tmp_path, packed[:cut], "t.gz").expected == "a whole gzip file"


def test_a_compressed_trace_is_detected_by_its_first_bytes(tmp_path: Path) -> None:
    packed = gzip.compress((AZURE + GOOD).encode())
    for name in ("trace.csv", "trace.csv.GZ", "trace"):
        assert list(open_trace(write(tmp_path, packed, name))) == [Arrival(0.0, 374, 44)]
    assert list(open_trace(write(tmp_path, AZURE + GOOD, "unpacked.gz"))) == [Arrival(0.0, 374, 44)]


def test_a_missing_trace_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a trace that can be read"):
        open_trace(tmp_path / "none.csv")


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"pipe: got 'no regular file', expected .* read several times"):
        open_trace(tmp_path / "pipe")  # no process writes there: opening it would block


def noted(path: Path) -> list[str]:
    with opened() as traces:
        for _ in range(2):
            list(open_trace(path))
    open_trace(path)
    assert len(traces) == 2
    return notes(traces)


def test_omitted_rows_are_reported(tmp_path: Path) -> None:
    failed = "5,ChatGPT,472,0,472,Conversation log\n"
    path = write(tmp_path, BURST + failed + "6,m,1,1,2,x\n" + failed.replace("5", "7", 1), "mine.csv")
    assert noted(path) == ["mine.csv: 2 of 3 rows are failed requests, left out"]
    assert noted(write(tmp_path, BURST + "6,m,1,1,2,x\n")) == []


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        (AZURE + GOOD + GOOD[:-2], True),  # 4 tokens instead of 44
        (SERVEGEN + "0,5,1,1\n1,5,1,10", True),
        (AZURE + GOOD + GOOD, False),
        (AZURE + GOOD[:-1] + "\r", False),
        (AZURE[:-1], False),
        (BURST + "6,m,1,1,2,Conver", False),  # a truncated line is not read
        (MOON + MOON[:-1], False),  # half of it would be no object
    ],
)
def test_a_last_row_without_a_line_end_is_reported(tmp_path: Path, text: str, cut: bool) -> None:
    expected = f"trace:{text.count(chr(10)) + 1}: the last line has no line end, as the others have"
    assert [note.startswith(expected) for note in noted(write(tmp_path, text))] == [True] * cut


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trace.csv", "trace.csv.gz"])
def test_reading_a_trace_takes_constant_memory(tmp_path: Path, name: str) -> None:
    def rows() -> bytes:
        return b"".join(b"%d,%d.5,143,20\n" % (i, i) for i in range(100_000))

    text = SERVEGEN.encode() + rows()
    path = write(tmp_path, gzip.compress(text, 1) if name.endswith("gz") else text, name)
    size = len(text)
    del text
    tracemalloc.start()
    try:
        count = sum(1 for _ in open_trace(path))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 100_000
    assert peak < 300_000 < size / 6


def test_the_public_azure_trace_is_read(azure: Path) -> None:
    trace = list(open_trace(azure))
    assert len(trace) == 19_366
    assert trace[0].at == 0.0 and trace[-1].at == pytest.approx(3501.7, abs=0.1)
    assert all(one.at <= other.at for one, other in pairwise(trace))
    assert sorted(each.input_tokens for each in trace)[len(trace) // 2] == 1020
    assert sorted(each.output_tokens for each in trace)[len(trace) // 2] == 129


def test_the_public_mooncake_trace_is_read(mooncake: Path) -> None:
    trace = list(open_trace(mooncake))
    assert len(trace) == 3993 and trace[-1].at == pytest.approx(1022.0, abs=0.1)
    assert all(len(each.blocks) == -(-each.input_tokens // BLOCK_TOKENS) for each in trace)
    seen: set[int] = set()
    again = 0
    for each in trace:
        again += len(seen.intersection(each.blocks))
        seen.update(each.blocks)
    assert again / sum(len(each.blocks) for each in trace) == pytest.approx(0.64, abs=0.01)
