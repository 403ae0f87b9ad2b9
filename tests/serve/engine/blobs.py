"""Adapters in a store of blobs, as no engine but a simulated one would load them."""

from __future__ import annotations

from pathlib import Path

from store.blobs import Blobs


def stored(root: Path, content: str) -> str:
    """Put an adapter with ``content`` in the place of its digest, and return that."""
    blobs = Blobs(root)
    with blobs.work() as work:
        part = work / "adapter"
        part.mkdir()
        (part / "adapter_config.json").write_text('{"peft_type": "LORA"}')
        (part / "adapter_model.safetensors").write_text(content)
        digest = blobs.seal(part, "test")
        blobs.publish(part, digest)
    return digest
