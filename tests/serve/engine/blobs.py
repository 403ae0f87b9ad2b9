"""Adapters in a store of blobs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from store.adapters import CONFIG, WEIGHTS
from store.adapters.blobs import AdapterBlobStore


def publish(root: Path, files: Mapping[str, bytes]) -> str:
    """Put the files in the place of their digest below ``root``, and return that."""
    blobs = AdapterBlobStore(root)
    with blobs.work() as work:
        part = work / "adapter"
        part.mkdir()
        for name, content in files.items():
            (part / name).write_bytes(content)
        digest = blobs.seal(part, "test")
        blobs.publish(part, digest)
    return digest


def stored(root: Path, content: str) -> str:
    """An adapter with ``content`` that no engine but a simulated one would load; returns its digest."""
    return publish(root, {CONFIG: b'{"peft_type": "LORA"}', WEIGHTS: content.encode()})
