"""Adapter files: found in this machine's directories in order, else pulled from the controller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import pytest

from policy.errors import AdapterRefused
from policy.wire.headers import SECRET_HEADER
from serve.engine.adapters.files import PULLS, AdapterFileCache
from store.adapters.blobs import AdapterBlobStore
from tests.serve.engine.blobs import stored

MAX_BYTES = 1 << 20
SECRET = "s"


@contextmanager
def controller(blobs: AdapterBlobStore, requests: list[str], gate: Event | None = None) -> Iterator[str]:
    """A controller with ``blobs`` for clients with the secret, once ``gate`` is set; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            *_, digest = self.path.split("/")
            requests.append(self.path)
            if gate is not None:
                gate.wait()
            if self.headers[SECRET_HEADER] != SECRET:
                self.send_error(401)
                return
            try:
                parts = list(blobs.tar(digest))
            except KeyError:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("connection", "close")
            self.end_headers()
            for part in parts:
                self.wfile.write(part)

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


Make = Callable[..., AdapterFileCache]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def files(
        *roots: str,
        controller: str = "",
        secret: str = SECRET,
        max_bytes: int = MAX_BYTES,
        cache_bytes: int = MAX_BYTES,
    ) -> AdapterFileCache:
        paths = [tmp_path / root for root in roots]
        return AdapterFileCache(
            paths, controller=controller, secret=secret, max_bytes=max_bytes, cache_bytes=cache_bytes
        )

    return files


async def test_the_first_directory_with_the_files_is_used(make: Make, tmp_path: Path) -> None:
    digest = stored(tmp_path / "head", "a")
    assert stored(tmp_path / "node", "a") == digest
    files = make("elsewhere", "head", "node")
    path = await files.fetch(digest)
    assert path == tmp_path / "head" / digest
    await files.warm(path)
    # A path of another machine is left alone.
    assert not (tmp_path / "elsewhere").exists()


async def test_missing_files_are_pulled_once_into_the_last_directory(make: Make, tmp_path: Path) -> None:
    digest = stored(tmp_path / "controller", "a")
    requests: list[str] = []
    with controller(AdapterBlobStore(tmp_path / "controller"), requests) as address:
        files = make("head", "node", controller=address)
        path = await files.fetch(digest)
        assert await files.fetch(digest) == path == tmp_path / "node" / digest
    assert requests == [f"/adapters/blobs/{digest}"]
    original = tmp_path / "controller" / digest
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (path / name).read_bytes() == (original / name).read_bytes()


@pytest.mark.parametrize(
    ("why", "message"),
    [
        ("no controller", "there are no files of DIGEST on this machine"),
        ("unknown", "the controller has no files of 000000000000"),
        ("secret", "the controller answered 401 to a request for DIGEST"),
        ("away", "the files of DIGEST could not be pulled from the controller"),
        ("full", "the files of DIGEST cannot be stored here: Not a directory"),
        ("large", ""),
    ],
)
async def test_unavailable_files_are_refused(make: Make, tmp_path: Path, why: str, message: str) -> None:
    digest = stored(tmp_path / "controller", "a")
    if why == "full":
        (tmp_path / "file").touch()
    with controller(AdapterBlobStore(tmp_path / "controller"), []) as address:
        files = make(
            "file/node" if why == "full" else "node",
            controller={"no controller": "", "away": "127.0.0.1:1"}.get(why, address),
            secret="x" if why == "secret" else SECRET,
            max_bytes=10 if why == "large" else MAX_BYTES,
        )
        with pytest.raises(AdapterRefused) as refused:
            await files.fetch("0" * 64 if why == "unknown" else digest)
    assert refused.value.code == ("too_large" if why == "large" else "files_missing")
    assert why == "large" or str(refused.value) == message.replace("DIGEST", digest[:12])
    assert AdapterBlobStore(tmp_path / "node").digests() == set()


async def test_deleted_files_are_pulled_again(make: Make, tmp_path: Path) -> None:
    digest = stored(tmp_path / "controller", "a")
    with controller(AdapterBlobStore(tmp_path / "controller"), []) as address:
        files = make("node", controller=address)
        path = await files.fetch(digest)
        assert AdapterBlobStore(tmp_path / "node").remove(digest)
        with pytest.raises(AdapterRefused):
            await files.warm(path)
        assert await files.fetch(digest) == path
        await files.warm(path)


async def test_pulled_files_that_no_engine_uses_are_deleted(make: Make, tmp_path: Path) -> None:
    a, b, c = digests = [stored(tmp_path / "controller", name) for name in "abc"]
    node = AdapterBlobStore(tmp_path / "node")
    with controller(AdapterBlobStore(tmp_path / "controller"), []) as address:
        files, other = (make("head", "node", controller=address, cache_bytes=0) for _ in range(2))
        await files.fetch(a)
        await other.fetch(b)
        assert node.digests() == {a, b}, "both are in use"
        await files.fetch(b)
        files.retain({b})
        other.retain(())
        await files.fetch(c)
        assert node.digests() == {b, c}, "no engine uses a any more"
        await other.fetch(a)
        assert node.digests() == set(digests)


async def test_local_files_do_not_wait_for_pulls(make: Make, tmp_path: Path) -> None:
    digest = stored(tmp_path / "node", "a")
    gate, requests = Event(), list[str]()
    with controller(AdapterBlobStore(tmp_path / "controller"), requests, gate) as address:
        files = make("node", controller=address)
        pulls = [asyncio.ensure_future(files.fetch(letter * 64)) for letter in "0123456789"]
        while len(requests) < PULLS:  # noqa: ASYNC110 - the test's own timeout bounds it
            await asyncio.sleep(0.001)
        assert await files.fetch(digest) == tmp_path / "node" / digest
        assert not any(pull.done() for pull in pulls)
        gate.set()
        failed = await asyncio.gather(*pulls, return_exceptions=True)
        assert all(isinstance(error, AdapterRefused) for error in failed)
