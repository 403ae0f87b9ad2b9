"""Unpack adapters from zip and tar archives. Archives are untrusted input.

Nothing is decompressed beyond the size limit, whatever the headers say. Member names are never used as paths.
An archive with a link, a device or a name outside of it is refused. The first bytes determine its type.
"""

from __future__ import annotations

import gzip
import io
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from policy.errors import AdapterRefused
from store.adapters import FILES
from store.adapters.validate import check_names

_invalid = partial(AdapterRefused, "archive")
_unsafe = partial(AdapterRefused, "path")
MAX_MEMBERS = 1000
# Limits in bytes of a zip's directory, of one tar header, and of all tar headers.
MAX_LIST_BYTES = 4 * 1024 * 1024
MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS_BYTES = 8 * 1024 * 1024
BLOCK_BYTES = 1024 * 1024
# Errors that the standard library raises for broken or malicious archives.
_BROKEN = (
    zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, zlib.error, struct.error, ValueError,
    OverflowError, NotImplementedError, RecursionError,
)  # fmt: skip
# Other methods decompress without a bound on the output of one call.
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


class _Member(NamedTuple):
    """A regular file of an archive, and a reader of its ``size`` bytes in blocks."""

    path: PurePosixPath
    size: int
    blocks: Callable[[], Iterator[bytes]]


def unpack(
    file: BinaryIO, into: Path, max_bytes: int, progress: Callable[[float], None] = lambda part: None
) -> None:
    """Copy the adapter in the archive ``file`` into the empty directory ``into``.

    Its files are at the top of the archive or in one folder. Raises :class:`policy.errors.AdapterRefused`:
    ``archive``, ``path``, ``too_large``, ``truncated``, ``pickle`` and ``not_an_adapter``. ``progress``
    receives the fraction of the archive that was read.
    """
    size = file.seek(0, io.SEEK_END) or 1
    found: dict[PurePosixPath, Path] = {}
    left = max_bytes
    try:
        for count, (path, claimed, blocks) in enumerate(_members(file, max_bytes)):
            left -= claimed
            if left < 0:
                raise AdapterRefused("too_large", f"the archive has more than {max_bytes} bytes in it")
            if count >= MAX_MEMBERS:
                raise _invalid(f"the archive has more than {MAX_MEMBERS} members")
            if path in found:
                raise _invalid(f"the archive has {str(path)!r:.100} twice")
            found[path] = into / f".{count}"
            if path.name not in FILES or len(path.parts) > 2:
                continue
            with found[path].open("xb") as target:
                for block in blocks():
                    target.write(block)
                    progress(min(file.tell() / size, 1.0))
    except EOFError:
        raise AdapterRefused("truncated", "the archive ends too early") from None
    except _BROKEN as error:
        raise _invalid(f"the archive cannot be read: {error}"[:300]) from None
    folder = _folder(found)
    check_names(path.name for path in found if path.parent == folder)
    for name in FILES:
        found[folder / name].rename(into / name)
    for rest in into.glob(".*"):
        rest.unlink()


def _members(file: BinaryIO, max_bytes: int) -> Iterator[_Member]:
    file.seek(0)
    head = file.read(512)
    file.seek(0)
    if head.startswith(b"PK\x03\x04"):
        return _of_zip(file)
    if head.startswith(b"\x1f\x8b"):
        return _of_tar(gzip.GzipFile(fileobj=file), max_bytes)
    if head[257:262] == b"ustar":
        return _of_tar(file, max_bytes)
    raise _invalid("it is no archive; expected .zip, .tar or .tar.gz")


def _of_zip(file: BinaryIO) -> Iterator[_Member]:
    guarded: Any = _Guarded(file, file.seek(0, io.SEEK_END), MAX_LIST_BYTES, MAX_LIST_BYTES)
    with zipfile.ZipFile(guarded) as archive:
        guarded.open()
        for info in archive.infolist():
            is_folder = info.filename.endswith("/")
            path = _safe(info.orig_filename, is_folder)
            # The upper 16 bits are the Unix mode, if the archive has one.
            kind = stat.S_IFMT(info.external_attr >> 16)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise _unsafe(f"the archive has {str(path)!r:.100}, which is no regular file")
            if is_folder:
                continue
            if info.flag_bits & 0x1 or info.compress_type not in _METHODS:
                raise _invalid(f"{str(path)!r:.100} is encrypted, or compressed otherwise than by deflate")
            yield _Member(path, info.file_size, lambda info=info: _unzipped(archive, info))  # type: ignore[misc]


def _unzipped(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Iterator[bytes]:
    """Read at most the size in the header; the module stops there and compares the checksum."""
    with archive.open(info) as member:
        while block := member.read(BLOCK_BYTES):
            yield block


def _of_tar(file: BinaryIO | gzip.GzipFile, max_bytes: int) -> Iterator[_Member]:
    end = max_bytes + MAX_HEADERS_BYTES
    guarded: Any = _Guarded(file, end, MAX_HEADER_BYTES, MAX_HEADERS_BYTES)
    with tarfile.open(fileobj=guarded, mode="r:") as archive:
        for info in archive:
            path = _safe(info.name, info.isdir())
            if not info.isdir() and (not info.isreg() or info.issparse()):
                raise _unsafe(f"the archive has {str(path)!r:.100}, which is no regular file")
            if info.isdir():
                continue
            yield _Member(path, info.size, lambda info=info: _untarred(file, info))  # type: ignore[misc]
    if isinstance(file, gzip.GzipFile):  # the checksum is at the end
        while file.tell() < end and file.read(BLOCK_BYTES):
            pass


def _untarred(file: BinaryIO | gzip.GzipFile, info: tarfile.TarInfo) -> Iterator[bytes]:
    file.seek(info.offset_data)
    left = info.size
    while left:
        block = file.read(min(left, BLOCK_BYTES))
        if not block:
            raise EOFError
        left -= len(block)
        yield block


def _safe(name: str, is_folder: bool) -> PurePosixPath:
    """``name`` as a path inside of the archive; refuses others."""
    path = PurePosixPath(name)
    odd = "\\" in name or not name.isprintable() or not (path.parts or is_folder)
    if odd or path.is_absolute() or ".." in path.parts:
        raise _unsafe(f"the archive has {name!r:.100}, a name that may lead out of it")
    return path


def _folder(found: Iterable[PurePosixPath]) -> PurePosixPath:
    """The folder of the adapter: the top of the archive, or the only folder with adapter files."""
    paths = list(found)
    top = PurePosixPath()
    if any(path.parent == top and path.name in FILES for path in paths):
        return top
    folders = {path.parent for path in paths if len(path.parts) == 2 and path.name in FILES}
    if len(folders) > 1:
        raise _invalid(f"the archive has adapters in {len(folders)} folders; expected one")
    if not folders:
        folders = {path.parent for path in paths if len(path.parts) == 2}
    return folders.pop() if len(folders) == 1 else top


class _Guarded:
    """Limits how the standard library's archive modules, which trust headers, read ``file``.

    ``end`` is the last offset that may be read, ``most`` the size limit of one read, and ``budget`` the limit
    of all reads until the archive is :meth:`open` and only members are read.
    """

    def __init__(self, file: BinaryIO | gzip.GzipFile, end: int, most: int, budget: int) -> None:
        self._file = file
        self._end = end
        self._most = most
        self._budget: float = budget

    def open(self) -> None:
        """The directory is read: from now on only single reads are limited."""
        self._budget = float("inf")

    def read(self, size: int = -1) -> bytes:
        if size < 0:
            size = self._end - self._file.tell()
        if size > self._most or size > self._budget:
            raise _invalid(f"the archive has a header of {size} bytes, more than is read of one")
        self._budget -= size
        return self._file.read(size)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_SET and offset < 0:
            raise _invalid("the archive says that it begins before it does")
        if whence == io.SEEK_SET and offset > self._end:
            raise AdapterRefused("too_large", f"the archive says that it has {offset} bytes in it or more")
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        """Does nothing: the owner of the file closes it."""
