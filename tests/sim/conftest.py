"""The public traces, which are read from outside the checkout."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

AZURE = "AzureLLMInferenceTrace_conv_2023.csv"
MOONCAKE = "mooncake_synthetic_trace.jsonl"


def _trace(name: str) -> Path:
    folder = os.environ.get("TIDEGATE_TRACES") or Path(__file__).parents[2].parent / "shared" / "traces"
    found = Path(folder) / name
    if not found.exists():
        pytest.skip(f"{found} is not here: set TIDEGATE_TRACES to the folder of the public traces")
    return found


@pytest.fixture
def azure() -> Path:
    return _trace(AZURE)


@pytest.fixture
def mooncake() -> Path:
    return _trace(MOONCAKE)
