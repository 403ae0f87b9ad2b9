"""Settings of all tests: how hypothesis searches for examples, and what collecting may not import."""

from __future__ import annotations

import sys

from hypothesis import HealthCheck, settings

# No deadline: the machine may be busy. The same examples in each run, so that a failure is due to a change.
settings.register_profile(
    "tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")


def pytest_collection_finish() -> None:
    # Ray reads its token mode when it is imported: a test that joins a cluster has to be the first.
    assert "ray" not in sys.modules, (
        "a test module imports Ray: import it in the test or fixture that uses it"
    )
