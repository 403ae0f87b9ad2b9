"""Metric files are allocated ahead of their series."""

from __future__ import annotations

import struct
from pathlib import Path

from prometheus_client.mmap_dict import MmapedDict

from gateway.telemetry.metric_file_preallocation import AHEAD, MODEL_BYTES, MetricFiles


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
