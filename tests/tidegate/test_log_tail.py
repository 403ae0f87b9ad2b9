"""The end of a log file, and its new lines across rotations."""

from __future__ import annotations

import contextlib
from pathlib import Path

from tidegate.log_tail import Follower, tail


def test_tail_returns_the_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("".join(f"{n}\n" for n in range(100)))
    assert tail(path, 2) == ["98", "99"]
    assert tail(path, 0) == []
    assert tail(tmp_path / "none.log", 5) == []


def test_following_gives_whole_lines_across_a_rotation(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("before\n")
    follower = Follower(path)
    with path.open("a") as file:
        file.write("one\ntw")
    assert follower.lines() == ["one"]
    with path.open("a") as file:
        file.write("o\n")
    path.rename(tmp_path / "a.log.1")
    path.write_text("three\n")
    assert follower.lines() == ["two", "three"]
    follower.close()
    with contextlib.closing(Follower(path, whole=True)) as whole:
        assert whole.lines() == ["three"]
