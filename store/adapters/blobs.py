"""Adapter files by digest: one immutable directory each, published atomically."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from policy.errors import AdapterRefused, TidegateError
from policy.wire.adapter_catalog import DIGEST
from store.adapters import FILES
from store.artifact_manifest import Manifest, entries, publish, read, seal, verified
from store.state_dir import locked
from store.tar_stream import pack, unpack

_LOG = logging.getLogger(__name__)
_WORK = ".work-"
# Partial downloads that were not resumed for this long are deleted.
KEPT_S = 7 * 86_400.0
_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))


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
        self.clear_abandoned()

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

    def use(self, digest: str) -> int | None:
        """A descriptor that spares the adapter from :meth:`trim` until it is closed or the process ends.

        The adapter counts as used now. ``None`` if it is not stored. Raises ``OSError``.
        """
        if DIGEST.fullmatch(digest) is None:
            return None
        path = self._root / digest
        try:
            held = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(held, fcntl.LOCK_SH)
            if os.path.samestat(os.fstat(held), path.stat()):
                os.utime(path)
                return held
        except FileNotFoundError:  # deleted meanwhile
            pass
        except BaseException:
            os.close(held)
            raise
        os.close(held)
        return None

    def trim(self, max_bytes: int) -> None:
        """Delete the least recently used adapters until the others have at most ``max_bytes``.

        The others also have at most half of the space that all adapters and the free part of the disk had.
        Adapters in use stay. Raises ``OSError``.
        """
        gone: list[tuple[Path, int]] = []
        try:
            with self._locked():
                found = sorted(self.digests(), key=lambda digest: -self.age_s(digest))
                sizes = {digest: _size(self._root / digest) for digest in found}
                used = sum(sizes.values())
                limit = min(max_bytes, (used + shutil.disk_usage(self._root).free) // 2)
                for digest in found:
                    if used <= limit:
                        break
                    if (held := _lock_unused(self._root / digest)) is None:
                        continue
                    # Beside the others: a full disk may have no room for a directory to move it to.
                    away = self._root / f"{_WORK}{digest}-{secrets.token_hex(4)}"
                    gone.append((away, held))
                    self._verified.discard(digest)
                    (self._root / digest).rename(away)
                    used -= sizes[digest]
        finally:
            for away, held in gone:
                shutil.rmtree(away, ignore_errors=True)
                os.close(held)

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

        It is deleted after success, refusal and cancellation. It is kept if the source became unreachable,
        unless this disk is full: others need the space.
        """
        path = self._parts / hashlib.sha256(source.encode()).hexdigest()
        held = _hold(path)
        try:
            yield path
            shutil.rmtree(path, ignore_errors=True)
        except Exception as error:
            came = any(part.stat().st_size for part in path.iterdir())
            refused = isinstance(error, TidegateError)
            unreachable = isinstance(error, AdapterRefused) and error.code == "source_unreachable"
            if (refused and not unreachable) or not came or _is_disk_full(error):
                shutil.rmtree(path, ignore_errors=True)
            raise
        finally:
            os.close(held)

    def clear_abandoned(self) -> None:
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


def _is_disk_full(error: BaseException) -> bool:
    """Whether ``error`` or a cause of it is a full disk; some download backends only say so in their text."""
    each: BaseException | None = error
    while each is not None:
        if any(text in str(each) for text in _FULL):
            return True
        each = each.__cause__ or each.__context__
    return False


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


def _size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.iterdir())


def _clear_unheld(path: Path) -> None:
    try:
        held = _lock_unused(path)
    except FileNotFoundError:
        return
    if held is not None:
        shutil.rmtree(path, ignore_errors=True)
        os.close(held)


def _lock_unused(path: Path) -> int | None:
    """A descriptor with an exclusive lock on the directory ``path``; ``None`` if another one has a lock."""
    held = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException as error:
        os.close(held)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return held
