"""For all tests: how hypothesis searches, what collecting may not import, and when rates can be measured."""

from __future__ import annotations

import gc
import signal
import sys

import psutil
import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.postgresql"]

# No deadline: the machine may be busy. The same examples in each run, so that a failure is due to a change.
settings.register_profile(
    "tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")
BUSY_PERCENT = 40.0
# A shell ignores it in what it runs in the background, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
# To search a million objects, those of all tests, for garbage takes half a second, three on a busy machine,
# while the replicas and clients of a test stand still: only what tests make is searched.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    # Ray reads its token mode when it is imported: a test that joins a cluster has to be the first.
    assert "ray" not in sys.modules, (
        "a test module imports Ray: import it in the test or fixture that uses it"
    )


@pytest.fixture(scope="session")
def idle_cores() -> None:
    """For a test of rates and latencies: skip it where other programs use the cores."""
    if (used := psutil.cpu_percent(2.0)) > BUSY_PERCENT:
        pytest.skip(f"other programs use {used:.0f} % of the cores: rates and latencies would be theirs")
