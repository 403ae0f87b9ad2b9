"""docs/traces.md describes every key as in the code, and its example traces are valid."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from policy.wire.capture import CaptureLine
from sim.workload.traces.detect_format import open_trace
from sim.workload.workload_spec import WorkloadSpec
from tests.test_configuration_reference import ROOT, default_of, kind_of, sections

PAGE = (Path(__file__).parents[3] / "docs" / "traces.md").read_text()
_HEADING = re.compile(r"^#+ `?([^`\n]+)`?$", re.MULTILINE)
_ROW = re.compile(r"^\| `(\w+)` \| (.*?) \| (.*?) \| (.+) \|$", re.MULTILINE)
# The two headings of tables that are no section of the workload file.
DOCUMENT = "What can a workload file say?"
CAPTURE = "What is in Tidegate's own format?"


def tables() -> dict[str, list[tuple[str, str, str]]]:
    parts = _HEADING.split(PAGE)[1:]
    found = {
        heading: [(key, kind, default) for key, kind, default, _ in _ROW.findall(text)]
        for heading, text in zip(parts[::2], parts[1::2], strict=True)
    }
    return {heading: rows for heading, rows in found.items() if rows}


def test_the_page_describes_every_key_and_its_values() -> None:
    expected = {
        DOCUMENT if path == ROOT else path: [
            (field.encode_name, kind_of(field.type, field.encode_name), default_of(field, path))
            for field in info.fields
        ]
        for path, info in sections(WorkloadSpec)
    }
    # The page describes both in one table.
    assert expected.pop("mix[].generate.output_tokens") == expected["mix[].generate.input_tokens"]
    found = tables()
    del found[CAPTURE]
    assert found == expected


def test_the_page_lists_the_capture_keys_that_are_read() -> None:
    assert [key for key, _, _ in tables()[CAPTURE]] == list(CaptureLine.__struct_fields__)


@pytest.mark.parametrize("block", re.findall(r"^```json\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
def test_the_example_capture_of_the_page_is_valid(block: str, tmp_path: Path) -> None:
    path = tmp_path / "shown.jsonl"
    path.write_text(block)
    assert len(list(open_trace(path))) == block.count("\n") - 1


@pytest.mark.parametrize("header", re.findall(r"^\| [\w ,']+ \| `(\w+(?:,[\w ]+)+)` \|", PAGE, re.MULTILINE))
def test_the_example_headers_of_the_page_have_a_known_format(header: str, tmp_path: Path) -> None:
    path = tmp_path / "shown.csv"
    path.write_text(header + "\n")
    assert list(open_trace(path)) == []
