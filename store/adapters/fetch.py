"""Fetch an adapter from a path, the web, the Hugging Face hub, or an object store.

The result is a private directory with the two regular files of an adapter and nothing else.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote

from policy.errors import AdapterRefused
from store.adapters import FILES, from_hub, from_object_store, from_web
from store.adapters.archive import unpack
from store.adapters.fetch_context import FetchJob
from store.adapters.validate import check_names

_URL = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://.+", re.IGNORECASE)
_FILE = re.compile(r"\w+://(localhost)?/")
MAX_SOURCE = 2048


def fetch(job: FetchJob) -> None:
    """Fill ``job.into`` with the adapter at its source; blocks until it is there.

    ``hf:ORG/NAME[@REVISION]``, ``http(s)://`` (an archive), ``file://``, any other URL that fsspec knows, or
    an absolute path: of a directory or an archive. Raises :class:`policy.errors.AdapterRefused`.
    """
    source = job.source
    if not source.isprintable() or not 0 < len(source) <= MAX_SOURCE:
        raise job.unreachable(f"expected a path or URL of at most {MAX_SOURCE} characters")
    if source.startswith(from_hub.SCHEME):
        from_hub.fetch(job)
    elif (match := _URL.fullmatch(source)) is None:
        _fetch_from_disk(job, _absolute(job, source))
    elif (scheme := match["scheme"].lower()) in ("http", "https"):
        from_web.fetch(job)
    elif scheme in ("file", "local"):
        _fetch_from_disk(job, _absolute(job, unquote(_FILE.sub("/", source, count=1))))
    else:
        from_object_store.fetch(job)
    found = {path.name for path in job.into.iterdir()}
    assert found == set(FILES), found


def _absolute(job: FetchJob, text: str) -> Path:
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:  # no such user
        raise job.unreachable(error) from error
    if not path.is_absolute():
        raise job.unreachable(
            "expected an absolute path, a URL or hf:ORG/NAME: the controller runs in another directory"
        )
    return path


BLOCK_BYTES = 1024 * 1024


def _fetch_from_disk(job: FetchJob, path: Path) -> None:
    """Copy the adapter in ``path``; raises :class:`policy.errors.AdapterRefused`.

    Its codes are ``source_unreachable``, ``changed``, ``path`` for what is no regular file, ``too_large``,
    and those of :func:`store.adapters.archive.unpack`.
    """
    progress = job.progress("fetch", f"copying {job.shown}")
    try:
        if path.is_dir():
            check_names(each.name for each in path.iterdir())
            _copy_files(job, path, progress)
        else:
            with _opened(path) as (file, size):
                if size > job.max_bytes:
                    raise job.too_large(size)
                unpack(file, job.into, job.max_bytes, progress)
    except OSError as error:
        raise job.unreachable(error.strerror or error) from error


def _copy_files(job: FetchJob, folder: Path, progress: Callable[[float], None]) -> None:
    """Open both files before the first is copied, so that they belong together."""
    config, weights = FILES
    with _opened(folder / config) as (first, small), _opened(folder / weights) as (second, large):
        whole = small + large
        if whole > job.max_bytes:
            raise job.too_large(whole)
        done = 0
        for source, size, name in ((first, small, config), (second, large, weights)):
            with (job.into / name).open("xb") as target:
                # Reading one byte more than its size shows whether it grows.
                while block := source.read(min(BLOCK_BYTES, size + 1 - target.tell())):
                    target.write(block)
                    done += len(block)
                    progress(min(done / max(whole, 1), 1.0))


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """The regular file ``path`` and its size in bytes; refused if either changes meanwhile."""
    before = path.lstat()
    if not stat.S_ISREG(before.st_mode):
        what = "a link" if stat.S_ISLNK(before.st_mode) else "no regular file"
        raise AdapterRefused("path", f"{path.name} is {what}; expected a regular file")
    # A link may lead anywhere, and opening a pipe would block until there is a writer.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        yield file, before.st_size
        # The opened file must be the one that was checked, and still be in place.
        if not _identity(before) == _identity(os.fstat(file.fileno())) == _identity(path.lstat()):
            raise AdapterRefused(
                "changed", f"{path.name} changed while it was copied; add it once it is whole"
            )


def _identity(found: os.stat_result) -> tuple[int, int, int, int]:
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
