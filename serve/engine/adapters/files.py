"""An adapter's files on this machine: found by digest or pulled from the controller, and read once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import httpx

from policy.errors import AdapterRefused
from policy.wire.headers import SECRET_HEADER
from store.adapters.blobs import Blobs

# Of one pull: the controller answers within it, and no pause between two pieces is longer.
PULL_TIMEOUT_S = 30.0
# Pulls at once; what is found on this machine waits for none of them.
PULLS = 4
BLOCK_BYTES = 4 * 1024 * 1024


class AdapterFileCache:
    """Looks in ``roots`` in order, and pulls what is in none of them into the last one.

    ``controller`` is the address of who has everything (empty: nobody), ``max_bytes`` the most that is taken.
    """

    def __init__(self, roots: Sequence[Path], *, controller: str, secret: str, max_bytes: int) -> None:
        self._roots = tuple(roots)
        self._stores: dict[Path, Blobs] = {}
        self._controller = controller
        self._secret = secret
        self._max_bytes = max_bytes
        self._pulls = asyncio.Semaphore(PULLS)

    async def fetch(self, digest: str) -> Path:
        """The directory of the adapter; raises :class:`policy.errors.AdapterRefused`."""
        try:
            path = await asyncio.to_thread(self._find, digest)
            if path is not None:
                return path
            async with self._pulls:
                return await asyncio.to_thread(self._pull, digest)
        except httpx.HTTPStatusError as error:
            said = f"the controller answers {error.response.status_code} to who asks for {digest[:12]}"
            if error.response.status_code == 404:
                said = f"the controller has no files of {digest[:12]}"
            raise AdapterRefused("files_missing", said) from error
        except httpx.HTTPError as error:
            said = f"the controller does not answer with the files of {digest[:12]}"
            raise AdapterRefused("files_missing", said) from error
        except OSError as error:
            said = f"the files of {digest[:12]} cannot be kept here: {error.strerror or error}"
            raise AdapterRefused("files_missing", said) from error

    async def warm(self, path: Path) -> None:
        """Read every file, so that an engine which reads them between two steps finds them in memory.

        Raises :class:`policy.errors.AdapterRefused`.
        """
        try:
            await asyncio.to_thread(_read, path)
        except OSError as error:
            raise AdapterRefused("files_missing", f"{path.name} cannot be read: {error}") from error

    def _find(self, digest: str) -> Path | None:
        # A root that is not there is another node's.
        stores = (self._store(root) for root in self._roots if root.is_dir())
        return next((path for store in stores if (path := store.path(digest)) is not None), None)

    def _store(self, root: Path) -> Blobs:
        if root not in self._stores:
            self._stores[root] = Blobs(root)
        return self._stores[root]

    def _pull(self, digest: str) -> Path:
        if not self._controller or not self._roots:
            raise AdapterRefused("files_missing", f"there are no files of {digest[:12]} on this machine")
        url = f"http://{self._controller}/adapters/blobs/{digest}"
        headers = {SECRET_HEADER: self._secret}
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
