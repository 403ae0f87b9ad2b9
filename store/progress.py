"""What preparing weights says while it runs, and what it gives: a directory and its digest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec


class Progress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line for the person who waits; ``fraction`` (0..1) is of this step, ``None`` if unknown."""

    step: str
    message: str
    fraction: float | None = None


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A Hugging Face model directory that is complete, and what identifies its content."""

    path: Path
    digest: str


Report = Callable[[Progress], None]
