"""A page of docs/ that is generated below one of its lines."""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


class GeneratedPage:
    """The page ``name``; what is below the line ``mark`` is generated."""

    def __init__(self, name: str, mark: str) -> None:
        self._path = DOCS / name
        self._above, self._mark, self.generated = self._path.read_text().partition(mark)

    def write(self, generated: str) -> None:
        self._path.write_text(self._above + self._mark + generated)
