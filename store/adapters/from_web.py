"""Adapters from an archive on the web; an interrupted download is resumed if the archive is unchanged."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import httpx

from policy.stats.backoff import Backoff
from store.adapters import public_hosts
from store.adapters.archive import unpack
from store.adapters.fetch_context import FetchJob, PartialDownload
from store.adapters.public_hosts import NotPublic

CONNECT_S = 10.0
SILENT_S = 30.0
# Maximum attempts in a row with too little progress, and the delays between them.
TRIES = 4
RETRY = Backoff(0.5)
# Minimum rate in bytes/s over this many seconds; slower servers would take days.
LEAST_RATE = 4096.0
PACE_S = 60.0
_RANGE = re.compile(r"bytes (?P<first>\d+)-\d+/(?P<whole>\d+)")


def fetch(
    job: FetchJob, pause: Callable[[float], None] = time.sleep, clock: Callable[[], float] = time.monotonic
) -> None:
    """Download and unpack the archive at ``http(s)://...``; raises :class:`policy.errors.AdapterRefused`.

    Its codes are ``source_unreachable`` (also for slow servers), ``source_not_public``, ``too_large``, and
    those of :func:`store.adapters.archive.unpack`.
    """
    part = PartialDownload(job, "archive")
    timeout = httpx.Timeout(SILENT_S, connect=CONNECT_S)
    tries = 0
    # Size and instant at which the attempts were last reset.
    before, since = part.size, clock()
    try:
        with _client(job, timeout) as client:
            while True:
                try:
                    _take(job, client, part, clock)
                    break
                except (httpx.TransportError, _Busy) as error:
                    tries += 1
                    if part.size - before > LEAST_RATE * (clock() - since):
                        tries, before, since = 1, part.size, clock()
                    if tries >= TRIES:
                        raise job.unreachable(str(error) or type(error).__name__) from error
                    pause(RETRY.delay_s(tries))
    except NotPublic as error:
        raise job.not_public(error) from error
    except (httpx.InvalidURL, httpx.HTTPError, UnicodeError) as error:
        raise job.unreachable(str(error) or type(error).__name__) from error
    with part.path.open("rb") as file:
        unpack(file, job.into, job.max_bytes, job.progress("unpack", f"unpacking {job.shown}"))


def _client(job: FetchJob, timeout: httpx.Timeout) -> httpx.Client:
    if job.hosts is not None:
        return public_hosts.client(job.hosts, timeout)
    return httpx.Client(timeout=timeout, follow_redirects=True, max_redirects=public_hosts.REDIRECTS)


class _Busy(Exception):
    """A failure that a retry may fix."""


def _take(job: FetchJob, client: httpx.Client, part: PartialDownload, clock: Callable[[], float]) -> None:
    """Request the missing bytes once and append them."""
    # No content encoding: an archive is already compressed.
    headers = {"accept-encoding": "identity"}
    if part.validator:
        headers |= {"range": f"bytes={part.size}-", "if-range": part.validator}
    with client.stream("GET", job.source, headers=headers) as answer:
        if job.source.startswith("https:") and answer.url.scheme != "https":
            raise job.unreachable("it leads from https to http")
        if answer.status_code == 416:
            if answer.headers.get("content-range") == f"bytes */{part.size}":
                return  # complete before this process started
            part.begin("")
            raise _Busy("the server does not go on with what is here")
        if answer.status_code in (408, 429) or answer.status_code >= 500:
            raise _Busy(f"the server answers {answer.status_code}")
        whole = _whole(job, answer, part)
        if whole > job.max_bytes:
            raise job.too_large(whole)
        progress = job.progress("fetch", f"downloading {job.shown}")
        size_before, since = part.size, clock()
        for block in answer.iter_raw():  # as it arrives: a buffered block would be lost on a break
            part.append(block)
            if (passed_s := clock() - since) >= PACE_S:
                if part.size - size_before < LEAST_RATE * passed_s:
                    raise job.unreachable(
                        f"it sends {part.size - size_before} bytes in {passed_s:.0f} s; expected"
                        f" {LEAST_RATE:.0f} a second at least"
                    )
                size_before, since = part.size, clock()
            if whole:
                progress(min(part.size / whole, 1.0))
        if whole and part.size < whole:
            raise _Busy(f"it ends after {part.size} of {whole} bytes")


def _whole(job: FetchJob, answer: httpx.Response, part: PartialDownload) -> int:
    """The size of the archive (0 if unknown); empties ``part`` unless the answer continues it."""
    if answer.status_code == 206:
        match = _RANGE.fullmatch(answer.headers.get("content-range", ""))
        if match is None or int(match["first"]) != part.size:
            part.begin("")
            raise _Busy("the server sends another range than was asked for")
        return int(match["whole"])
    if answer.status_code != 200:
        raise job.unreachable(f"the server answers {answer.status_code}")
    etag = answer.headers.get("etag", "")
    # A weak etag may stay equal when bytes change.
    part.begin(answer.headers.get("last-modified", "") if etag.startswith("W/") or not etag else etag)
    length = answer.headers.get("content-length", "")
    return int(length) if length.isdigit() else 0
