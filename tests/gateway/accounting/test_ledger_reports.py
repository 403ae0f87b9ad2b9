"""The accounting process' metrics take the files and descriptors that they need, and no more."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from gateway.accounting.ledger_reports import LedgerMetrics
from policy.wire.usage_query import LedgerStatus


def status() -> LedgerStatus:
    return LedgerStatus(waiting=0, behind_s=0.0, segments=0, lost=0)


def test_there_are_files_of_gauges_and_no_others(tmp_path: Path) -> None:
    LedgerMetrics(tmp_path, status).publish()
    kinds = ("gauge_livesum", "gauge_livemax")
    assert {path.name for path in tmp_path.iterdir()} == {f"{kind}_{os.getpid()}.db" for kind in kinds}


def test_tries_on_a_full_disk_take_no_more_descriptors(tmp_path: Path) -> None:
    metrics = LedgerMetrics(tmp_path, status)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        opened = set[int]()
        for _ in range(3):
            with pytest.raises(OSError, match="File too large"):
                metrics.publish()
            opened.add(len(list(Path("/proc/self/fd").iterdir())))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(opened) == 1
    metrics.publish()
