"""The end of a log file, and its new lines across rotations."""

from __future__ import annotations

import contextlib
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tidegate import log_tail
from tidegate.log_tail import LogFollower, tail


def written(second: int, level: str = "info") -> str:
    return f'{{"at":"2026-01-02T09:00:{second:02}+00:00","level":"{level}","event":"{second}"}}\n'


def texts(path: Path, lines: int | None, **options: Any) -> list[str]:
    return [entry.text for entry in tail(path, lines, **options)]


def test_tail_returns_the_last_lines_also_of_rotated_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_tail, "_BLOCK_BYTES", 200)
    path = tmp_path / "a.log"
    for name, seconds in (("a.log.2", range(10)), ("a.log.1", range(10, 20)), ("a.log", range(20, 30))):
        levels = ("error" if second % 10 == 0 else "info" for second in seconds)
        (tmp_path / name).write_text("".join(map(written, seconds, levels)))
    assert texts(path, 2) == ["28", "29"]
    assert texts(path, 0) == []
    assert texts(path, 12) == [str(second) for second in range(18, 30)]
    assert texts(path, None) == [str(second) for second in range(30)]
    assert texts(path, 2, level="warning") == ["10", "20"]
    since = datetime.fromisoformat("2026-01-02T09:00:15+00:00").timestamp()
    assert texts(path, None, since=since) == [str(second) for second in range(15, 30)]
    assert texts(path, None, since=since, level="error") == ["20"]
    assert texts(tmp_path / "none.log", 5) == []


def test_following_gives_whole_lines_across_a_rotation(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("before\n")
    follower = LogFollower(path)
    with path.open("a") as file:
        file.write("one\ntw")
    assert follower.lines() == ["one"]
    with path.open("a") as file:
        file.write("o\n")
    path.rename(tmp_path / "a.log.1")
    path.write_text("three\n")
    assert follower.lines() == ["two", "three"]
    follower.close()
    with contextlib.closing(LogFollower(path, whole=True)) as whole:
        assert whole.lines() == ["three"]
