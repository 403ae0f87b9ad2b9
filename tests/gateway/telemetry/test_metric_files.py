"""Metric files are allocated ahead of their series, and merged when their process has ended."""

from __future__ import annotations

import errno
import os
import resource
import struct
import threading
from pathlib import Path

import pytest
from prometheus_client.mmap_dict import MmapedDict, mmap_key

from gateway.telemetry.metric_files import AHEAD, ENDED, MODEL_BYTES, MetricFiles, merge_ended, read_families


def allocated(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_what_a_file_may_grow_to_is_allocated_before_it_grows(tmp_path: Path) -> None:
    files = MetricFiles(tmp_path, 7)
    files.reserve(models=0)
    path = tmp_path / "counter_7.db"
    assert allocated(path) >= MODEL_BYTES["counter"]
    series = MmapedDict(str(path))
    for number in range(2000):
        files.reserve(models=1)
        series.write_value(f"a series of some length, number {number}", 1.0, 0.0)
        used = struct.unpack("=i", path.read_bytes()[:4])[0]
        assert allocated(path) >= used
    files.reserve(models=1)
    series.close()
    assert allocated(path) >= AHEAD * used
    assert allocated(tmp_path / "histogram_7.db") >= 2 * MODEL_BYTES["histogram"]


# No process has such a pid.
GONE = 4_194_305
KINDS = ("counter", "histogram", "gauge")
HELP = "A metric."


def write(directory: Path, pid: int, *, requests: int, name: str = "m") -> None:
    """The files of a process that counted these requests, each in a bucket of a histogram."""
    for kind, key in (
        ("counter", mmap_key("requests", "requests_total", ["model"], [name], HELP)),
        ("histogram", mmap_key("ttft", "ttft_bucket", ["model", "le"], [name, "0.1"], HELP)),
        ("histogram", mmap_key("ttft", "ttft_sum", ["model"], [name], HELP)),
        ("gauge_livesum", mmap_key("in_flight", "in_flight", ["model"], [name], HELP)),
    ):
        series = MmapedDict(str(directory / f"{kind}_{pid}.db"))
        series.write_value(key, float(requests), 0.0)
        series.close()


def read(directory: Path) -> dict[tuple[str, ...], float]:
    families = read_families(directory, KINDS)
    return {(each.name, *each.labels.values()): each.value for family in families for each in family.samples}


def test_counts_of_ended_processes_are_merged_and_their_files_removed(tmp_path: Path) -> None:
    write(tmp_path, os.getppid(), requests=1)
    for pid in range(GONE, GONE + 3):
        write(tmp_path, pid, requests=10)
        write(tmp_path, pid, requests=5, name=str(pid))
        (tmp_path / f"histogram_{pid + 10}.db").touch()  # it ended before it could allocate the file
        (tmp_path / f"exemplars_{pid}.json").touch()
        expected = read(tmp_path)
        merge_ended(tmp_path)
        assert read(tmp_path) == expected
    assert expected["requests_total", "m"] == expected["ttft_count", "m"] == 31.0
    assert expected["in_flight", "m"] == 1.0, "gauges are of processes that live"
    names = {path.name for path in tmp_path.iterdir()} - {"lock"}
    kinds = ("counter", "histogram", "gauge_livesum")
    assert names == {f"{kind}_{os.getppid()}.db" for kind in kinds} | {
        f"{kind}_{ENDED}.db" for kind in KINDS[:2]
    }


def test_a_read_meanwhile_counts_all_once(tmp_path: Path) -> None:
    ended = threading.Event()
    seen: set[float] = set()

    def reads() -> None:
        while not ended.is_set():
            seen.add(read(tmp_path)["requests_total", "m"])

    for pid in range(GONE, GONE + 50):
        write(tmp_path, pid, requests=1)
    reader = threading.Thread(target=reads)
    reader.start()
    try:
        for last in range(GONE + 50, GONE + 100):
            write(tmp_path, last, requests=0)
            merge_ended(tmp_path)
    finally:
        ended.set()
        reader.join()
    assert seen <= {50.0}
    assert read(tmp_path)["requests_total", "m"] == 50.0


def test_on_a_full_disk_the_counts_stay_until_they_can_be_merged(tmp_path: Path) -> None:
    for pid in (GONE, GONE + 1):
        write(tmp_path, pid, requests=10)
    expected = read(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
            merge_ended(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert read(tmp_path) == expected
    merge_ended(tmp_path)
    assert read(tmp_path) == expected
    assert not list(tmp_path.glob("*_4*.db"))
