"""Rotating logs: bounded size, whole lines, and reads from the end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from store.log_file import KEPT, RotatingLog


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "x.log"


@pytest.fixture
def log(path: Path) -> Iterator[RotatingLog]:
    made = RotatingLog(path, max_bytes=10)
    yield made
    made.close()


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.parent.iterdir())}


def test_a_log_rotates_before_its_size_limit_and_keeps_a_few_files(path: Path, log: RotatingLog) -> None:
    for number in range(6):
        log.write(b"%d" % number * 6)
    assert contents(path) == {"x.log": b"555555", "x.log.1": b"444444", "x.log.2": b"333333"}
    assert len(contents(path)) == KEPT + 1


def test_one_write_is_never_split(path: Path, log: RotatingLog) -> None:
    log.write(b"a")
    log.write(b"b" * 30)
    log.write(b"c")
    assert contents(path) == {"x.log": b"c", "x.log.1": b"b" * 30, "x.log.2": b"a"}


def test_a_reopened_log_is_continued_up_to_its_size_limit(path: Path, log: RotatingLog) -> None:
    log.write(b"123456")
    again = RotatingLog(path, max_bytes=10)
    again.write(b"7890")
    assert contents(path) == {"x.log": b"1234567890"}
    again.write(b"x")
    assert contents(path) == {"x.log": b"x", "x.log.1": b"1234567890"}
    again.close()


def test_a_log_that_could_not_rotate_is_written_when_it_can(path: Path, log: RotatingLog) -> None:
    log.write(b"000000")
    away = path.parent.rename(path.parent.with_name("away"))
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            log.write(b"111111")
    away.rename(path.parent)
    log.write(b"222222")
    assert contents(path) == {"x.log": b"222222", "x.log.1": b"000000"}


async def test_a_full_disk_loses_lines_without_blocking(tmp_path: Path) -> None:
    (tmp_path / "x.log").symlink_to("/dev/full")
    log = RotatingLog(tmp_path / "x.log")
    source = asyncio.StreamReader()
    source.feed_data(b"lost\n")
    source.feed_eof()

    with pytest.raises(OSError, match="No space left"):
        log.write(b"lost")
    await log.pump(source)
    assert source.at_eof()
    log.close()


def test_a_partial_write_is_completed(path: Path, log: RotatingLog) -> None:
    whole = log._file

    class Short:
        def tell(self) -> int:
            return whole.tell()

        def write(self, data: memoryview) -> int:
            return whole.write(data[:2])

        def close(self) -> None:
            whole.close()

    log._file = Short()  # type: ignore[assignment]
    log.write(b"12345")
    assert contents(path) == {"x.log": b"12345"}
