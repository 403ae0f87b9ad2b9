"""Adapter files by digest: one immutable directory each, published atomically."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from policy.errors import AdapterRefused
from policy.wire.adapter_catalog import DIGEST
from store.adapters import FILES
from store.artifact_manifest import Manifest, entries, publish, read, seal, verified
from store.state_dir import locked
from store.tar_stream import pack, unpack

_LOG = logging.getLogger(__name__)
_WORK = ".work-"
# Partial downloads that were not resumed for this long are deleted.
KEPT_S = 7 * 86_400.0


class AdapterBlobStore:
    """The adapters stored under ``root``; safe for all threads and processes of one machine.

    Every method blocks; some read a whole adapter.
    """

    def __init__(self, root: Path, clock: Callable[[], float] = time.time) -> None:
        self._root = root
        self._clock = clock
        self._verified: set[str] = set()
        self._damaged: set[str] = set()
        self._parts = root / ".parts"
        self._parts.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._clear()

    def path(self, digest: str) -> Path | None:
        """The directory of the adapter, verified once per process; ``None`` if incomplete."""
        if DIGEST.fullmatch(digest) is None:
            return None
        path = self._root / digest
        if not path.is_dir():
            self._verified.discard(digest)
            return None
        if digest not in self._verified:
            manifest = verified(path, lambda progress: _LOG.info("%s", progress.message))
            if manifest is None or manifest.digest != digest:
                _LOG.warning("the adapter in %s is not what it was; it is not used", path)
                self._damaged.add(digest)
                return None
            self._damaged.discard(digest)
            self._verified.add(digest)
        return path

    def publish(self, part: Path, digest: str) -> Path:
        """Move the sealed directory ``part``, from :meth:`work`, into place; an existing adapter stays.

        Raises ``ValueError`` if it is not sealed with ``digest``, and ``OSError``.
        """
        manifest = read(part)
        if manifest is None or manifest.digest != digest or DIGEST.fullmatch(digest) is None:
            raise ValueError(f"{part} is not sealed as {digest}")
        final = self._root / digest
        with self._locked():
            if self.path(digest) is None:
                publish(part, final)
                self._damaged.discard(digest)
                self._verified.add(digest)
            # The deletion of unused files sees by this time that a record may be about to name it.
            os.utime(final)
        return final

    def seal(self, part: Path, source: str) -> str:
        """Write the manifest of ``part`` and sync it to disk; its digest. Raises ``OSError``."""
        manifest = Manifest(source=source, files=entries(part))
        for name in manifest.files:
            (part / name).chmod(0o444)
        seal(part, manifest)
        return manifest.digest

    def digests(self) -> set[str]:
        return {path.name for path in self._root.iterdir() if DIGEST.fullmatch(path.name)}

    def missing(self, digests: Collection[str]) -> set[str]:
        """Those of ``digests`` that are not stored, or that were found damaged when they were last read."""
        return set(digests) - (self.digests() - self._damaged)

    def age_s(self, digest: str) -> float:
        """Seconds since it was last published; infinite if it is not stored."""
        try:
            return self._clock() - (self._root / digest).stat().st_mtime
        except FileNotFoundError:
            return float("inf")

    def remove(self, digest: str, older_s: float = 0.0) -> bool:
        """Delete the adapter if it was last published at least ``older_s`` ago; whether it was deleted.

        An engine that has mapped the files keeps them.
        """
        if DIGEST.fullmatch(digest) is None:
            return False
        with self.work() as work, self._locked():
            if self.age_s(digest) < older_s:
                return False
            self._verified.discard(digest)
            with suppress(FileNotFoundError):
                (self._root / digest).rename(work / digest)
        return True

    def tar(self, digest: str) -> Iterator[bytes]:
        """The files as a tar stream for :meth:`take_tar`; raises ``KeyError`` if they are not stored."""
        path = self.path(digest)
        manifest = None if path is None else read(path)
        if path is None or manifest is None:
            raise KeyError(digest)
        return pack(path, manifest.files)

    def take_tar(self, chunks: Iterable[bytes], digest: str, max_bytes: int) -> Path:
        """Store a stream of :meth:`tar` of at most ``max_bytes`` under ``digest``, which is verified.

        Raises :class:`policy.errors.AdapterRefused` (``changed`` for another digest) and ``OSError``.
        """
        with self.work() as work:
            part = work / "adapter"
            part.mkdir()
            unpack(chunks, part, FILES, max_bytes)
            found = self.seal(part, f"store:{digest}")
            if found != digest:
                raise AdapterRefused("changed", f"what came as {digest:.12} is {found:.12}")
            return self.publish(part, digest)

    @contextmanager
    def work(self) -> Iterator[Path]:
        """A private temporary directory beside the adapters, deleted at the end or by a later process."""
        with self._locked():
            path = Path(tempfile.mkdtemp(prefix=_WORK, dir=self._root))
            held = os.open(path, os.O_RDONLY)
            fcntl.flock(held, fcntl.LOCK_EX)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
            os.close(held)

    @contextmanager
    def parts(self, source: str) -> Iterator[Path]:
        """A directory for partial downloads of ``source``, which outlives this process; one user at a time.

        It is deleted after success or refusal, and kept if the source became unreachable.
        """
        path = self._parts / hashlib.sha256(source.encode()).hexdigest()
        held = _hold(path)
        try:
            yield path
            shutil.rmtree(path, ignore_errors=True)
        except AdapterRefused as refused:
            came = any(part.stat().st_size for part in path.iterdir())
            if refused.code != "source_unreachable" or not came:
                shutil.rmtree(path, ignore_errors=True)
            raise
        finally:
            os.close(held)

    def _clear(self) -> None:
        """Delete directories of killed processes, and abandoned downloads."""
        before = self._clock() - KEPT_S
        with self._locked():
            for path in self._root.glob(f"{_WORK}*"):
                _clear_unheld(path)
            for path in self._parts.iterdir():
                with suppress(FileNotFoundError):  # its holder has deleted it
                    if path.stat().st_mtime < before:
                        _clear_unheld(path)

    def _locked(self) -> AbstractContextManager[None]:
        """Lock out other threads and processes while directories are renamed."""
        return locked(self._root / ".lock")


def _hold(path: Path) -> int:
    """A descriptor with an exclusive lock on the directory ``path``."""
    while True:
        with suppress(FileExistsError):
            # Not `exist_ok`: it raises if another holder deletes the directory meanwhile.
            path.mkdir(mode=0o700)
        try:
            held = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue
        fcntl.flock(held, fcntl.LOCK_EX)
        try:
            if os.path.samestat(os.fstat(held), path.stat()):
                return held
        except FileNotFoundError:  # the former holder has deleted it
            pass
        os.close(held)


def _clear_unheld(path: Path) -> None:
    try:
        held = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    except BlockingIOError:
        pass
    finally:
        os.close(held)
