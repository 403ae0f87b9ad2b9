"""The end of a worker's data plane: a part that fails to close keeps no other open."""

from __future__ import annotations

import fcntl
import io
import random
from pathlib import Path

import pytest

from gateway.intake.usage_journal import UsageCharge
from gateway.telemetry.traces.exporter import TraceExporter
from policy.tenancy.price import TokenRates
from store.state_dir import StateDir
from tests.gateway.telemetry.test_access_log import logging_gateway


class BrokenExporter(TraceExporter):
    async def close(self) -> None:
        raise OSError("It does not close.")


async def test_the_usage_journal_is_given_up_when_another_part_fails_to_close(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    traces = BrokenExporter(0, random.Random(7), lambda count, cause: None)  # noqa: S311
    gateway = logging_gateway(state, io.StringIO(), traces)
    UsageCharge(gateway.journal, "", "", "m", "", TokenRates(0, 0, 0), 0).begin()
    (segment,) = state.usage_path.iterdir()
    gateway.end_captures()
    with segment.open("rb") as file:
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(OSError, match="does not close"):
            await gateway.close()
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
