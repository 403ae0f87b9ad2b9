"""Every test that the table of fault rows names exists."""

from __future__ import annotations

import re
from pathlib import Path

import tests.faults

TESTS = Path(__file__).parents[1]


def test_each_row_names_tests_that_exist() -> None:
    table = tests.faults.__doc__ or ""
    named = re.findall(r"(\w+/[\w/]+\.py)((?:\s*::\w+)+)", table)
    assert len(named) > 30
    missing = [
        f"{path}::{name}"
        for path, names in named
        for name in re.findall(r"::(\w+)", names)
        if not re.search(rf"def {name}", (TESTS / path).read_text())
    ]
    assert missing == []
