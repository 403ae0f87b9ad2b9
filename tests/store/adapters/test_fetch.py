"""Fetching: changed sources, interrupted downloads, limits, and secrets."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import fsspec  # type: ignore[import-untyped]
import huggingface_hub
import pytest
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]
from huggingface_hub.errors import RepositoryNotFoundError

from policy.errors import AdapterRefused, TargetError
from store.adapters import CONFIG, FILES, WEIGHTS, from_web
from store.adapters.blobs import AdapterBlobStore
from store.adapters.fetch import fetch
from store.adapters.fetch_context import FetchJob, identity, redacted
from store.adapters.import_adapter import import_adapter
from store.progress_report import ProgressLine
from tests.store.adapters.making import LIMITS, TERMS, files, tarred, write, zipped

ARCHIVE = zipped(files())


def job(tmp_path: Path, source: str, reported: list[ProgressLine] | None = None) -> FetchJob:
    into, parts = tmp_path / "into", tmp_path / "parts"
    into.mkdir()
    parts.mkdir(exist_ok=True)
    report = [].append if reported is None else reported.append
    return FetchJob(source, into, parts, LIMITS.max_bytes, report)


def fetched(given: FetchJob) -> dict[str, bytes]:
    fetch(given)
    return {path.name: path.read_bytes() for path in given.into.iterdir()}


def refused(run: Callable[[], object]) -> AdapterRefused:
    with pytest.raises(AdapterRefused) as caught:
        run()
    return caught.value


# A directory of this machine.


@pytest.mark.parametrize("change", [CONFIG, WEIGHTS, "replace", "archive"])
def test_a_directory_that_changes_during_the_copy_is_refused(change: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "a", files())
    other = write(tmp_path / "b", files()) / WEIGHTS
    archive = tmp_path / "a.tar"
    archive.write_bytes(tarred(files(), compressed=False))

    def edit(_: ProgressLine) -> None:
        if change == "archive":
            os.utime(archive, (1, 1))
        elif change != "replace":
            with (folder / change).open("ab") as file:
                file.write(b"more")
        elif other.exists():
            other.rename(folder / WEIGHTS)

    given = job(tmp_path, str(archive if change == "archive" else folder))
    error = refused(lambda: fetch(given._replace(report=edit)))
    assert (error.code, "changed while it was copied" in str(error)) == ("changed", True)


# HTTP.


class Site:
    """A server of one archive, which can break off, refuse ranges, and change."""

    def __init__(self, data: bytes = ARCHIVE) -> None:
        self.data = data
        self.etag = '"v1"'
        self.length = True
        # How many bytes each of the next answers gives before it breaks off; then whole ones.
        self.breaks: list[int] = []
        self.statuses: list[int] = []
        self.location = ""
        self.ranges: list[str | None] = []
        self.url = ""

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        asked = request.headers.get("range")
        self.ranges.append(asked)
        if self.statuses:
            request.send_response(self.statuses.pop(0))
            if self.location:
                request.send_header("location", self.location)
            request.send_header("content-length", "0")
            request.end_headers()
            return
        first = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
        goes_on = asked is not None and request.headers.get("if-range") == self.etag
        if goes_on and first >= len(self.data):
            request.send_response(416)
            request.send_header("content-range", f"bytes */{len(self.data)}")
            request.send_header("content-length", "0")
            request.end_headers()
            return
        body = self.data[first:] if goes_on else self.data
        request.send_response(206 if goes_on else 200)
        if goes_on:
            whole = len(self.data)
            request.send_header("content-range", f"bytes {first}-{whole - 1}/{whole}")
        request.send_header("etag", self.etag)
        if self.length:
            request.send_header("content-length", str(len(body)))
        request.end_headers()
        request.wfile.write(body[: self.breaks.pop(0)] if self.breaks else body)
        request.close_connection = True


@contextmanager
def served(site: Site) -> Iterator[Site]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            site.answer(self)

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: Any) -> None:
            """Ignore clients that disconnect."""

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        site.url = f"http://127.0.0.1:{server.server_address[1]}/a.zip"
        try:
            yield site
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    pauses: list[float] = []
    monkeypatch.setattr(from_web.fetch, "__defaults__", (pauses.append, lambda: 0.0))
    return pauses


@pytest.mark.parametrize(
    ("site", "ranges", "pauses"),
    [
        ({}, [None], []),
        ({"breaks": [1000, 500]}, [None, "bytes=1000-", "bytes=1500-"], [0.5, 0.5]),
        # A weak etag may stay equal when bytes change.
        ({"breaks": [1000], "etag": 'W/"v1"'}, [None, None], [0.5]),
        ({"statuses": [503, 502]}, [None] * 3, [0.5, 1.0]),
        ({"statuses": [302], "location": "/a.zip"}, [None] * 2, []),
    ],
    ids=["whole", "resumed", "not resumed", "busy", "redirected"],
)
def test_an_archive_over_http_is_fetched_with_retries_and_resumed(
    site: dict[str, Any], ranges: list[str | None], pauses: list[float], tmp_path: Path, direct: list[float]
) -> None:
    reports: list[ProgressLine] = []
    with served(Site()) as server:
        vars(server).update(site)
        assert fetched(job(tmp_path, server.url, reports)) == files()
    assert [each.fraction for each in reports if each.step == "fetch"][-1] == 1.0
    assert (server.ranges, direct) == (ranges, pauses)


class Clock:
    """Each call returns so many seconds more than the one before."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.now = 0.0

    def __call__(self) -> float:
        self.now += self.step_s
        return self.now


@pytest.mark.parametrize("slow", [True, False], ids=["sends too little", "breaks off after a few bytes"])
def test_a_server_that_sends_too_slowly_is_given_up(slow: bool, tmp_path: Path) -> None:
    clock = Clock(2 * from_web.PACE_S if slow else 0.0)

    def pause(seconds: float) -> None:
        clock.now += seconds

    with served(Site()) as site:
        site.breaks = [] if slow else [4] * 100
        error = refused(lambda: from_web.fetch(job(tmp_path, site.url), pause, clock))
    assert (error.code, "4096 a second at least" in str(error)) == ("source_unreachable", slow)
    assert len(site.ranges) == (1 if slow else from_web.TRIES)


@pytest.mark.slow
def test_a_download_is_resumed_by_another_process(tmp_path: Path, blobs: AdapterBlobStore) -> None:
    with served(Site()) as site:
        site.breaks = [1000, 1, 1, 1, 0, 0, 0, 0]
        error = refused(lambda: import_adapter(blobs, site.url, TERMS, lambda _: None))
        assert error.code == "source_unreachable"
        site.breaks = []
        again = AdapterBlobStore(tmp_path / "adapters")
        taken = import_adapter(again, site.url, TERMS, lambda _: None)
        assert site.ranges[-1] == "bytes=1003-"
    assert again.digests() == {taken.digest}
    assert list((tmp_path / "adapters" / ".parts").iterdir()) == []


@pytest.mark.parametrize(
    ("part", "etag", "asked"),
    [(ARCHIVE, '"v1"', f"bytes={len(ARCHIVE)}-"), (b"x" * 100, '"v0"', "bytes=100-")],
    ids=["complete", "of another archive"],
)
def test_a_partial_download_is_resumed_later(part: bytes, etag: str, asked: str, tmp_path: Path) -> None:
    with served(Site()) as site:
        given = job(tmp_path, site.url)
        (given.parts / "archive.part").write_bytes(part)
        (given.parts / "archive.validator").write_text(etag)
        assert fetched(given) == files()
        assert site.ranges == [asked]


@pytest.mark.parametrize(("factor", "length", "kept"), [(1, True, 0), (3, False, LIMITS.max_bytes)])
def test_an_archive_that_is_too_large_is_refused(
    factor: int, length: bool, kept: int, tmp_path: Path
) -> None:
    with served(Site(bytes(factor * LIMITS.max_bytes + 1))) as site:
        site.length = length
        error = refused(lambda: fetch(job(tmp_path, site.url)))
    assert (error.code, "bytes or more" in str(error)) == ("too_large", True)
    assert (tmp_path / "parts" / "archive.part").stat().st_size <= kept


@pytest.mark.parametrize(
    ("status", "tries", "message"),
    [
        *((404, 1, "the server answers 404"), (403, 1, "answers 403"), (500, 4, "answers 500")),
        *((429, 4, "answers 429"), (302, 6, "redirects")),
    ],
)
def test_an_http_error_of_a_server_is_named(status: int, tries: int, message: str, tmp_path: Path) -> None:
    with served(Site()) as site:
        site.statuses, site.location = [status] * 9, site.url
        error = refused(lambda: fetch(job(tmp_path, site.url)))
        assert len(site.ranges) == tries
    assert (error.code, message in str(error)) == ("source_unreachable", True), str(error)


@pytest.mark.slow
def test_secrets_of_a_source_are_not_revealed(tmp_path: Path, blobs: AdapterBlobStore) -> None:
    with served(Site()) as site:
        secret = site.url.replace("http://", "http://user:KEY-1@") + "?signature=KEY-2"
        reports: list[ProgressLine] = []
        taken = import_adapter(blobs, secret, TERMS, reports.append)
        site.statuses = [404]
        error = refused(lambda: import_adapter(blobs, secret, TERMS, reports.append))
        path = blobs.path(taken.digest)
        assert path is not None
        shown = f"{taken} {error} {reports} {(path / 'manifest.json').read_text()}"
    assert not re.search("KEY-[12]|user", shown)
    assert taken.source == site.url
    assert redacted("/a/b@c?d") == "/a/b@c?d", "a path is no URL"
    assert not re.search("KEY-[12]|user", identity(secret, "key"))


def test_identities_differ_as_sources_do() -> None:
    at = "https://h/get"
    same = [at, f"{at}?id=1", f"{at}?id=2", f"{at}#id=1", "https://u:p@h/get", "/a/b@c?d", "hf:org/a@b"]
    assert len({identity(each, "key") for each in same}) == len(same)
    assert [identity(each, "key") for each in same if redacted(each) == each] == [at, *same[-2:]]
    assert identity(same[1], "key") == identity(same[1], "key") != identity(same[1], "other")


# The hub.


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The hub's client with its two functions replaced: its content, and the calls."""
    state: dict[str, Any] = {"files": {**files(), "README.md": b"x"}, "asked": [], "error": None, "comes": []}

    class Api:
        def __init__(self, token: str | None) -> None:
            state["token"] = token

        def model_info(self, repo: str, *, revision: str | None, files_metadata: bool) -> Any:
            state["asked"].append((repo, revision))
            if state["error"]:
                raise state["error"]
            siblings = [
                SimpleNamespace(rfilename=name, size=len(data)) for name, data in state["files"].items()
            ]
            return SimpleNamespace(sha="c0ffee", siblings=siblings)

    def download(repo: str, *, revision: str, allow_patterns: list[str], local_dir: Path, **_: Any) -> str:
        state["asked"].append((repo, revision))
        for name in state["comes"] or allow_patterns:
            (local_dir / name).write_bytes(state["files"][name])
        return str(local_dir)

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return state


@pytest.mark.slow
def test_both_files_are_fetched_from_one_commit_of_the_hub(tmp_path: Path, hub: dict[str, Any]) -> None:
    (tmp_path / "token").write_text("hf_abc")
    given = job(tmp_path, "hf:org/name@v1.0")._replace(token_file=str(tmp_path / "token"))
    assert fetched(given) == files()
    assert hub["asked"] == [("org/name", "v1.0"), ("org/name", "c0ffee")]
    assert hub["token"] == "hf_abc"


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ({CONFIG: b"{}", "adapter_model.bin": b"x"}, "pickle"),
        ({"config.json": b"{}"}, "not_an_adapter"),
        ({**files(), WEIGHTS: bytes(LIMITS.max_bytes)}, "too_large"),
    ],
)
def test_listed_files_are_checked_before_they_are_fetched(
    content: dict[str, bytes], code: str, tmp_path: Path, hub: dict[str, Any], bucket: Any
) -> None:
    hub["files"] = content
    given = job(tmp_path, "hf:org/name")
    assert refused(lambda: fetch(given)).code == code
    assert hub["asked"] == [("org/name", None)]
    for name, data in content.items():
        bucket.pipe(f"/b/x/{name}", data)
    assert refused(lambda: fetch(given._replace(source="memory://b/x"))).code == code


def test_a_download_of_the_hub_that_is_incomplete_can_be_retried(tmp_path: Path, hub: dict[str, Any]) -> None:
    hub["comes"] = [CONFIG]
    given = job(tmp_path, "hf:org/name")
    error = refused(lambda: fetch(given))
    assert (error.code, "cannot be reached any more" in str(error)) == ("source_unreachable", True)
    hub["comes"] = []
    assert fetched(given) == files()


def test_a_missing_repository_or_token_file_is_refused(tmp_path: Path, hub: dict[str, Any]) -> None:
    (tmp_path / "token").write_text("hf_abc")
    answer = SimpleNamespace(status_code=401, headers={}, request=None)
    hub["error"] = RepositoryNotFoundError("hf_abc", response=answer)  # type: ignore[arg-type]
    given = job(tmp_path, "hf:org/name")
    error = refused(lambda: fetch(given._replace(token_file=str(tmp_path / "token"))))
    assert error.code == "source_unreachable"
    assert "does not exist on the Hugging Face hub" in str(error) and "hf_abc" not in str(error)
    error = refused(lambda: fetch(given._replace(token_file=str(tmp_path / "nowhere"))))
    assert "cannot be read" in str(error)


# Object stores, with one in memory.


@pytest.fixture
def bucket() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    yield system
    system.rm("/", recursive=True)


def test_a_prefix_of_an_object_store_is_fetched(tmp_path: Path, bucket: Any) -> None:
    for name, data in {**files(), "README.md": b"x"}.items():
        bucket.pipe(f"/b/sql/{name}", data)
    assert fetched(job(tmp_path, "memory://b/sql")) == files()


class ListingStore(MemoryFileSystem):  # type: ignore[misc]  # fsspec ships no types
    """A store whose driver keeps listings until they are invalidated, as s3fs does."""

    protocol = "listing"
    listings: ClassVar[dict[str, Any]] = {}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("listing://")))

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        if path not in self.listings:
            self.listings[path] = super().ls(path, detail=detail)
        return self.listings[path]

    def invalidate_cache(self, path: str | None = None) -> None:
        self.listings.clear()


def test_a_prefix_that_was_incomplete_is_fetched_once_it_is_whole(tmp_path: Path, bucket: Any) -> None:
    fsspec.register_implementation("listing", ListingStore, clobber=True)
    given = job(tmp_path, "listing://b/sql")
    bucket.pipe(f"/b/sql/{CONFIG}", files()[CONFIG])
    assert refused(lambda: fetch(given)).code == "not_an_adapter"
    bucket.pipe(f"/b/sql/{WEIGHTS}", files()[WEIGHTS])
    assert fetched(given) == files()


def test_an_interrupted_download_from_an_object_store_is_resumed(tmp_path: Path, bucket: Any) -> None:
    bucket.pipe("/b/a.zip", ARCHIVE)
    given = job(tmp_path, "memory://b/a.zip")
    (given.parts / "archive.part").write_bytes(b"\0" * 10 + ARCHIVE[10:1000])
    assert fetched(given) == files(), "of another object nothing is used"
    for name in FILES:
        (given.into / name).unlink()
    (given.parts / "archive.part").write_bytes(ARCHIVE[:1000])
    seen: list[int] = []
    source = bucket.open("/b/a.zip").__class__
    original = source.seek
    try:
        source.seek = lambda self, *at: seen.append(at[0]) or original(self, *at)
        assert fetched(given) == files()
    finally:
        source.seek = original
    assert 1000 in seen


def test_a_cancelled_download_ends_as_such(tmp_path: Path, bucket: Any) -> None:
    def cancel(_: ProgressLine) -> None:
        raise TargetError("sql was removed")

    bucket.pipe("/b/a.zip", ARCHIVE)
    with pytest.raises(TargetError):
        fetch(job(tmp_path, "memory://b/a.zip")._replace(report=cancel))


def test_an_object_that_changes_during_the_download_is_refused(tmp_path: Path, bucket: Any) -> None:
    bucket.pipe("/b/a.zip", ARCHIVE)
    given = job(tmp_path, "memory://b/a.zip")
    again = given._replace(report=lambda _: bucket.pipe("/b/a.zip", ARCHIVE + b"x"))
    assert refused(lambda: fetch(again)).code == "changed"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        *((path, "") for path in ("adapters/sql", "./a", "", "a\nb", "/x" * 2000, "~nobody-here/a")),
        *((f"http{rest}", "") for rest in ("://127.0.0.1:1/a.zip", ":///a", "://[::1/a", "s://h:99999/a")),
        *((name, "expected hf:ORG/NAME") for name in ("hf:name", "hf:", "hf:o/n/x", "hf:../n")),
        ("memory://b/nowhere", "memory://b/nowhere cannot be fetched: there is no such object"),
        ("gopher://h/a", "gopher"),
        ("simplecache::memory://b/a.zip", "expected an absolute path"),
        ("zip://a::memory://b/a.zip", "not one inside another"),
    ],
)
def test_an_unsupported_source_is_refused(source: str, message: str, tmp_path: Path) -> None:
    error = refused(lambda: fetch(job(tmp_path, source)))
    assert (error.code, message in str(error)) == ("source_unreachable", True), str(error)


def test_a_driver_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    error = refused(lambda: fetch(job(tmp_path, "s3://bucket/sql")))
    assert error.code == "source_unreachable"
    assert "Install s3fs to access S3" in str(error)
    assert "pip install s3fs" in str(error)
