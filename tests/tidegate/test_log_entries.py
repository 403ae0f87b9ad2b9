"""Lines of Tidegate, vLLM, Ray, uvicorn and of a crash become entries of one form."""

from __future__ import annotations

from datetime import datetime

import pytest

from store.json_log_format import line
from tidegate.log_entries import LogEntry, entries

NOW = datetime(2026, 1, 2, 12, 0, 0).timestamp()


def local(*parts: int) -> float:
    return datetime(*parts).timestamp()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("raw", "at", "level", "text"),
    [
        (
            '{"at":"2026-01-02T09:00:00.250+00:00","level":"error","event":"call_failed","worker":0,"route":"/v1",'
            '"request_id":"a b","count":3,"model":null,"error":"KeyError"}',
            datetime.fromisoformat("2026-01-02T09:00:00.250+00:00").timestamp(), "error",
            'call_failed route=/v1 request_id="a b" count=3 error=KeyError',
        ),
        ("(Core pid=7) INFO 01-02 09:00:01 [a.py:7] up", local(2026, 1, 2, 9, 0, 1), "info", "[a.py:7] up"),
        ("WARNING 12-31 23:00:00 [a.py:1] old", local(2025, 12, 31, 23), "warning", "[a.py:1] old"),
        ("ERROR 02-29 23:00:00 [x.py:1] leap", local(2024, 2, 29, 23), "error", "[x.py:1] leap"),
        (
            "2026-01-02 09:00:02,500\tINFO scripts.py:9 -- Ray runs", local(2026, 1, 2, 9, 0, 2, 500_000),
            "info", "scripts.py:9 -- Ray runs",
        ),
        ("[2026-01-02 09:00:02,500] ERROR: no", local(2026, 1, 2, 9, 0, 2, 500_000), "error", "no"),
        ("WARNING:  Invalid HTTP request", NOW, "warning", "Invalid HTTP request"),
        ("\x1b[36mRay\x1b[0m started", NOW, "info", "Ray started"),
        ("Traceback (most recent call last):", NOW, "error", "Traceback (most recent call last):"),
        ('{"message": "not ours"}', NOW, "info", '{"message": "not ours"}'),
        ("{", NOW, "info", "{"),
        *(
            (foreign, NOW, "info", foreign)
            for foreign in (
                '{"at":"2026-01-02T09:00:00+00:00","level":"warn","event":"not ours"}',
                '{"at":"2026-01-02T09:00:00+00:00","level":"info","event":"not ours","traceback":null}',
                "2026-13-45 99:99:99,123 no time",
            )
        ),
        ("", NOW, "info", ""),
    ],
)  # fmt: skip
def test_a_line_becomes_an_entry(raw: str, at: float, level: str, text: str) -> None:
    assert entries("p", [raw], NOW) == [LogEntry(at, level, "p", text)]


def test_lines_without_an_instant_have_that_of_the_line_before_or_else_the_next() -> None:
    raw = [
        "banner",
        "INFO 01-02 09:00:00 [a.py:1] one",
        "more",
        "Traceback (most recent call last):",
        "  File",
        "INFO 01-02 09:00:05 [a.py:1] two",
    ]
    first, last = local(2026, 1, 2, 9), local(2026, 1, 2, 9, 0, 5)
    assert [(entry.at, entry.level) for entry in entries("p", raw, NOW)] == [
        (first, "info"), (first, "info"), (first, "info"), (first, "error"), (first, "error"), (last, "info"),
    ]  # fmt: skip


def test_an_entry_is_printed_with_its_time_level_and_process() -> None:
    written = line("warning", "first\nsecond", {"traceback": ["a:1 f", "b:2 g"]}).decode()
    shown = [str(entry) for entry in entries("gateway-0", written.splitlines(), NOW)]
    assert [text.split(maxsplit=3)[3] for text in shown] == ["first", "second", "a:1 f", "b:2 g"]
    at, level, process, _ = shown[0].split(maxsplit=3)
    assert (datetime.fromisoformat(at).utcoffset() is not None, level, process) == (
        True,
        "WARNING",
        "gateway-0",
    )
