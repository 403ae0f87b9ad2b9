"""Where tables are printed."""

from __future__ import annotations

import sys

from rich.console import Console

# A pipe has no width of its own; a table needs about this much to stay on single lines.
_PIPE_COLUMNS = 140


def console() -> Console:
    """A console on standard output, as wide as the terminal."""
    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else _PIPE_COLUMNS)
