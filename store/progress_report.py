"""Progress and result of preparing weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec


class PreparedWeights(msgspec.Struct, frozen=True, kw_only=True):
    """A complete Hugging Face model directory, and the digest of its content."""

    path: Path
    digest: str


class ProgressLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A progress line for users; ``fraction`` (0 to 1) of the step, ``None`` if unknown."""

    step: str
    message: str
    fraction: float | None = None


Report = Callable[[ProgressLine], None]
