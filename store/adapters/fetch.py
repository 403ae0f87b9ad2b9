"""Fetch an adapter from a path, the web, the Hugging Face hub, or an object store.

The result is a private directory with the two regular files of an adapter and nothing else.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

from store.adapters import FILES, from_disk, from_hub, from_object_store, from_web
from store.adapters.fetch_job import FetchJob

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
        from_disk.fetch(job, _absolute(job, source))
    elif (scheme := match["scheme"].lower()) in ("http", "https"):
        from_web.fetch(job)
    elif scheme in ("file", "local"):
        from_disk.fetch(job, _absolute(job, unquote(_FILE.sub("/", source, count=1))))
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
