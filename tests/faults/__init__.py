"""Faults and bad input against real gateway processes; each test is named by its row."""

import pytest

pytest.register_assert_rewrite("tests.faults.aftermath", "tests.faults.raw_client", "tests.faults.stand")
