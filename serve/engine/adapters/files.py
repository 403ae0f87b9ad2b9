"""Adapter files on this machine: found by digest, or pulled from the controller."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Sequence
from pathlib import Path

import httpx

from policy.errors import AdapterRefused
from policy.wire.controller import Controllers
from policy.wire.headers import SECRET_HEADER
from store.adapters.blobs import AdapterBlobStore

# Read timeout of a pull: for the first byte, and between two blocks.
PULL_TIMEOUT_S = 30.0
# Maximum concurrent pulls. Files found on this machine do not wait for them.
PULLS = 4
BLOCK_BYTES = 4 * 1024 * 1024
# Pulled files are kept up to this size, the least recently used are deleted first.
CACHE_BYTES = 32 * 1024**3


class AdapterFileCache:
    """Looks in the directories ``roots`` in order; files found in none are pulled into the last one.

    ``controller`` has the addresses to pull from (empty: none), ``max_bytes`` is the size limit of a pull.
    Before a pull, files of the last directory that no engine uses are deleted down to ``cache_bytes``.
    """

    def __init__(
        self,
        roots: Sequence[Path],
        *,
        controller: str,
        secret: str,
        max_bytes: int,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._roots = tuple(roots)
        self._stores: dict[Path, AdapterBlobStore] = {}
        self._controllers = Controllers(controller)
        self._secret = secret
        self._max_bytes = max_bytes
        self._cache_bytes = cache_bytes
        self._pulls = asyncio.Semaphore(PULLS)
        # Descriptors that spare files of the last directory from deletion, by digest.
        self._used: dict[str, int] = {}

    async def fetch(self, digest: str) -> Path:
        """The directory of the adapter; raises :class:`policy.errors.AdapterRefused`.

        The files stay until :meth:`retain` is called without them.
        """
        try:
            if digest not in self._used and (held := await asyncio.to_thread(self._use, digest)) is not None:
                self._spare(digest, held)
            path = await asyncio.to_thread(self._find, digest)
            if path is not None:
                return path
            async with self._pulls:
                path = await asyncio.to_thread(self._pull, digest)
            if (held := await asyncio.to_thread(self._use, digest)) is not None:
                self._spare(digest, held)
            return path
        except httpx.HTTPStatusError as error:
            reason = f"the controller answered {error.response.status_code} to a request for {digest[:12]}"
            if error.response.status_code == 404:
                reason = f"the controller has no files of {digest[:12]}"
            raise AdapterRefused("files_missing", reason) from error
        except httpx.HTTPError as error:
            reason = f"the files of {digest[:12]} could not be pulled from the controller"
            raise AdapterRefused("files_missing", reason) from error
        except OSError as error:
            reason = f"the files of {digest[:12]} cannot be stored here: {error.strerror or error}"
            raise AdapterRefused("files_missing", reason) from error

    def retain(self, digests: Collection[str]) -> None:
        """The files of all but these may be deleted."""
        for digest in self._used.keys() - digests:
            os.close(self._used.pop(digest))

    async def warm(self, path: Path) -> None:
        """Read every file into the page cache, so that the engine's load between two steps is short.

        Raises :class:`policy.errors.AdapterRefused`.
        """
        try:
            await asyncio.to_thread(_read, path)
        except OSError as error:
            raise AdapterRefused("files_missing", f"{path.name} cannot be read: {error}") from error

    def _find(self, digest: str) -> Path | None:
        # A directory that does not exist belongs to another node.
        stores = (self._store(root) for root in self._roots if root.is_dir())
        return next((path for store in stores if (path := store.path(digest)) is not None), None)

    def _use(self, digest: str) -> int | None:
        root = self._roots[-1] if self._roots else None
        return self._store(root).use(digest) if root is not None and root.is_dir() else None

    def _spare(self, digest: str, held: int) -> None:
        if (former := self._used.pop(digest, None)) is not None:
            os.close(former)
        self._used[digest] = held

    def _store(self, root: Path) -> AdapterBlobStore:
        if root not in self._stores:
            self._stores[root] = AdapterBlobStore(root)
        return self._stores[root]

    def _pull(self, digest: str) -> Path:
        if not self._controllers.first or not self._roots:
            raise AdapterRefused("files_missing", f"there are no files of {digest[:12]} on this machine")
        self._store(self._roots[-1]).trim(self._cache_bytes)
        *others, last = self._controllers.in_turn()
        for address in others:
            try:
                return self._pull_from(address, digest)
            except httpx.HTTPError:  # it does not lead
                self._controllers.failed(address)
        return self._pull_from(last, digest)

    def _pull_from(self, address: str, digest: str) -> Path:
        url, headers = f"http://{address}/adapters/blobs/{digest}", {SECRET_HEADER: self._secret}
        with (
            httpx.Client(headers=headers, timeout=PULL_TIMEOUT_S, trust_env=False) as client,
            client.stream("GET", url) as answer,
        ):
            answer.raise_for_status()
            return self._store(self._roots[-1]).take_tar(answer.iter_bytes(), digest, self._max_bytes)


def _read(directory: Path) -> None:
    block = bytearray(BLOCK_BYTES)
    for path in directory.iterdir():
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass
