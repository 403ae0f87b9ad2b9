"""The manifest of a prepared model or adapter: its origin and the digest of every file."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec

from store.progress_report import ProgressLine, Report
from store.state_dir import write_atomic

NAME = "manifest.json"
# hashlib.file_digest reads 256 KiB at a time; weights are hundreds of megabytes.
BLOCK_BYTES = 4 * 1024 * 1024


class ManifestFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file."""

    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The origin and the files of a model or adapter.

    For a package: its name, version, and the extracted file with its sha256.
    """

    source: str
    files: dict[str, ManifestFile]
    package: str = ""
    version: str = ""
    source_file: str = ""
    source_sha256: str = ""

    @property
    def digest(self) -> str:
        """The digest of the content, the same on every machine."""
        return content_digest(self.files)


_decode = msgspec.json.Decoder(Manifest).decode


def content_digest(files: dict[str, ManifestFile]) -> str:
    """sha256 over the sorted names and digests of the files: equal content, equal digest."""
    whole = hashlib.sha256()
    for name, entry in sorted(files.items()):
        whole.update(f"{name}\0{entry.sha256}\n".encode())
    return whole.hexdigest()


def sha256_file(path: Path) -> str:
    """The hexadecimal sha256 of a file's content; raises ``OSError``."""
    whole = hashlib.sha256()
    block = memoryview(bytearray(BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            whole.update(block[:count])
    return whole.hexdigest()


def entries(directory: Path) -> dict[str, ManifestFile]:
    """Every file of ``directory`` but the manifest, with its size and digest; raises ``OSError``."""
    return {
        path.name: ManifestFile(size=path.stat().st_size, sha256=sha256_file(path))
        for path in sorted(directory.iterdir())
        if path.name != NAME
    }


def seal(directory: Path, manifest: Manifest) -> None:
    """Write the manifest and sync everything to disk, so that a rename publishes a complete model."""
    for name in manifest.files:
        _sync(directory / name)
    write_atomic(directory / NAME, msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
    _sync(directory)


def publish(part: Path, final: Path) -> None:
    """Replace ``final`` atomically by the sealed directory ``part``."""
    if final.exists():
        # A directory cannot replace a non-empty one; an engine that has mapped the old one keeps it.
        final.rename(part.with_name(f"{part.name}.old"))
    part.rename(final)
    _sync(final.parent)


def read(directory: Path) -> Manifest | None:
    """The manifest of ``directory``; ``None`` if it is missing or unreadable."""
    try:
        return _decode((directory / NAME).read_bytes())
    except (OSError, msgspec.DecodeError):
        return None


def verified(directory: Path, report: Report) -> Manifest | None:
    """The manifest if its files are complete and unchanged; otherwise ``None``, with a report."""
    manifest = read(directory)
    if manifest is None:
        return None
    report(ProgressLine(step="verify", message=f"checking the digests of {directory.name}"))
    try:
        found = entries(directory)
    except OSError as error:
        report(ProgressLine(step="verify", message=f"{directory.name} cannot be read: {error}"))
        return None
    for name in sorted(found.keys() | manifest.files.keys()):
        if found.get(name) != manifest.files.get(name):
            report(ProgressLine(step="verify", message=f"{directory.name}/{name} is not what was prepared"))
            return None
    return manifest


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
