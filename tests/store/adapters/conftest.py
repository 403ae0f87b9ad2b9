"""A store of adapters in a temporary directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from store.adapters.blobs import AdapterBlobStore


@pytest.fixture
def blobs(tmp_path: Path) -> AdapterBlobStore:
    return AdapterBlobStore(tmp_path / "adapters")
