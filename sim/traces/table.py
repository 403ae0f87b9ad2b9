"""Rows of a CSV with a header, and the numbers in them."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Mapping

from sim.traces.lines import Lines

# No context is longer: it is a number in the wrong place.
MAX_TOKENS = 10_000_000
_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?", re.ASCII)


def cells(line: str) -> list[str]:
    """The cells of one line, without the space around them; one, where its quotes make no sense."""
    try:
        row = next(csv.reader([line])) if '"' in line else line.split(",")
    except csv.Error:
        row = [line]
    return [cell.strip() for cell in row]


class Table:
    """The rows below ``header``, each as its cells; ``at`` says where a column stands.

    Raises :class:`policy.errors.TraceError` for a row with another number of cells, such as half a line.
    """

    def __init__(self, lines: Lines, header: list[str]) -> None:
        self.lines = lines
        self.at: Mapping[str, int] = {name: i for i, name in enumerate(header)}
        self._header = header

    def __iter__(self) -> Iterator[list[str]]:
        for line in self.lines:
            row = cells(line)
            if len(row) != len(self._header):
                raise self.lines.refused(line, f"{len(self._header)} values: {','.join(self._header)}")
            yield row

    def number(self, row: list[str], column: str) -> float:
        """The finite number in ``column`` that is not negative."""
        text = row[self.at[column]]
        value = float(text) if _NUMBER.fullmatch(text) else math.nan
        if not 0.0 <= value < math.inf:
            raise self.lines.refused(text, f"a number of at least 0 in {column}")
        return value

    def tokens(self, row: list[str], column: str, least: int = 1) -> int:
        """The whole number in ``column``, of at least ``least`` tokens."""
        text = row[self.at[column]]
        # Whoever saves a column with gaps writes 12 as 12.0.
        value = float(text) if _NUMBER.fullmatch(text) else math.nan
        if not (least <= value <= MAX_TOKENS and value.is_integer()):
            raise self.lines.refused(text, f"a whole number, {least}..{MAX_TOKENS}, in {column}")
        return int(value)
