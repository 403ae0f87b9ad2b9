"""Arguments and options that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

# A file that is there.
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def trace_option(*, required: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``--trace``."""
    return click.option(
        "--trace",
        required=required,
        type=FILE,
        help="A trace as it was published or captured, or a workload in YAML.",
    )
