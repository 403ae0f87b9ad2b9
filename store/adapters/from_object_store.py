"""Adapters from object stores, by fsspec: a prefix with the two files, or an archive."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import fsspec  # type: ignore[import-untyped]
from fsspec.registry import known_implementations  # type: ignore[import-untyped]

from policy.errors import AdapterRefused, TidegateError
from store.adapters import FILES, WEIGHTS
from store.adapters.archive import unpack
from store.adapters.fetch_context import FetchJob, PartialDownload
from store.adapters.validate import check_names

BLOCK_BYTES = 4 * 1024 * 1024
# Their URLs name a bucket: the host is that of the machine's own settings.
STORES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl"})
# Properties that change with an object's content, by drivers' names, the most exact first.
_MARKS = ("etag", "md5hash", "versionid", "generation", "mtime", "lastmodified", "updated", "created")


def fetch(job: FetchJob) -> None:
    """Download from ``s3://...``, ``gs://...`` or any other URL of fsspec's.

    Drivers find the machine's credentials themselves. Raises
    :class:`policy.errors.AdapterRefused`: ``source_unreachable``, also where the driver is not installed,
    ``source_not_public``, ``changed``, ``too_large``, and those of :func:`store.adapters.archive.unpack`.
    """
    protocol = job.source.partition("://")[0]
    if "::" in job.source:
        raise job.unreachable("expected a single URL, not one inside another")
    named = protocol.lower() not in STORES
    if job.hosts is not None and named and not job.hosts.lists(urlsplit(job.source).hostname or ""):
        raise job.not_public(
            "expected http(s)://, hf:, s3://, gs://, az:// or a host of the model's adapters.private_hosts"
        )
    try:
        system, path = fsspec.core.url_to_fs(job.source)
    except ImportError as error:
        # Such as "Install s3fs to access S3".
        hint = known_implementations.get(protocol, {}).get("err", error)
        raise job.unreachable(f"{hint}; for s3:// run `.venv/bin/pip install s3fs`") from error
    except Exception as error:  # each driver has its own exceptions
        raise job.unreachable(error) from error
    try:
        # Drivers keep their instances, and in them listings for ever: what came since would not be seen.
        system.invalidate_cache()
        if not system.isfile(path):
            _take_folder(job, system, path)
            return
        part = _take(job, system, path, "archive")
    except TidegateError:  # refused, or the job was cancelled
        raise
    except FileNotFoundError as error:  # its text is the path
        raise job.unreachable("there is no such object or folder") from error
    except Exception as error:  # likewise
        raise job.unreachable(str(error) or type(error).__name__) from error
    with part.path.open("rb") as file:
        unpack(file, job.into, job.max_bytes, job.progress("unpack", f"unpacking {job.shown}"))


def _take_folder(job: FetchJob, system: Any, path: str) -> None:
    places = {each["name"].rstrip("/").rpartition("/")[2]: each for each in system.ls(path, detail=True)}
    check_names(places)
    whole = sum(int(places[file].get("size") or 0) for file in FILES)
    if whole > job.max_bytes:
        raise job.too_large(whole)
    for file in FILES:
        part = _take(job, system, places[file]["name"], file)
        part.path.rename(job.into / file)


def _take(job: FetchJob, system: Any, path: str, name: str) -> PartialDownload:
    """Copy one object; resumes an interrupted download of the same content."""
    part = PartialDownload(job, name)
    size, mark = before = _identity(system, path)
    if part.validator != mark or not mark:
        part.begin(mark)
    if size > job.max_bytes:
        raise job.too_large(size)
    progress = job.progress("fetch", f"downloading {job.shown}") if name in (WEIGHTS, "archive") else None
    with system.open(path, "rb") as source:
        if part.size:
            source.seek(part.size)
        while block := source.read(BLOCK_BYTES):
            part.append(block)
            if progress and size:
                progress(min(part.size / size, 1.0))
    if _identity(system, path) != before:
        raise AdapterRefused("changed", f"{job.shown} changed while it was copied; add it once it is whole")
    return part


def _identity(system: Any, path: str) -> tuple[int, str]:
    """The size of an object (0 if unknown), and a mark that changes with its content."""
    system.invalidate_cache()
    details = {key.lower().replace("_", ""): value for key, value in system.info(path).items()}
    mark = next((f"{key} {details[key]}" for key in _MARKS if details.get(key)), "")
    return int(details.get("size") or 0), mark
