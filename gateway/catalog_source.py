"""Follow the controller's catalog of adapters, and keep the last one on disk for when it is away."""

from __future__ import annotations

import asyncio

import msgspec

from gateway.catalog import CatalogView
from gateway.feed import Feed
from gateway.log import Log
from policy.catalog import Catalog
from store.state import StateDir

SAVE_EVERY_S = 1.0


class CatalogSource:
    """The stream of catalogs of one controller.

    The first of a connection is always taken, since the controller is the authority even when its clock went
    back; after it only newer ones are.
    """

    def __init__(
        self,
        address: str,
        state: StateDir,
        view: CatalogView,
        log: Log,
        *,
        connect_timeout_s: float,
    ) -> None:
        self._state = state
        self._view = view
        self._log = log
        self._decoder = msgspec.json.Decoder(Catalog)
        self._connected = False
        self._line = b""
        self._kept: Catalog | None = None
        self.feed = Feed(
            f"http://{address}",
            "/adapters/stream",
            state.secret(),
            connect_timeout_s,
            on_line=self._on_line,
            on_down=self._on_down,
        )

    def start_from_disk(self) -> None:
        """Serve on with the last catalog until the controller answers."""
        try:
            catalog = self._state.load(self._state.catalog_path, Catalog)
        except ValueError:
            self._log.warning("catalog_file_unreadable")
            return
        self._kept = catalog
        if catalog is not None and not self._view.known:
            self._view.take(catalog)

    async def keep_on_disk(self) -> None:
        """Write each new version, at most once a second; one worker of a host does."""
        while True:
            await asyncio.sleep(SAVE_EVERY_S)
            catalog = self._view.catalog
            if not self._view.known or catalog is self._kept:
                continue
            try:
                await asyncio.to_thread(self._state.save, self._state.catalog_path, catalog)
                self._kept = catalog
            except OSError as error:
                self._log.warning("catalog_not_saved", error=type(error).__name__)

    def _on_line(self, line: bytes) -> None:
        # Of thousands of adapters a line is large, and most lines only say that the controller lives.
        if line == self._line:
            self._connected = True
            return
        try:
            catalog = self._decoder.decode(line)
        except ValueError:
            self._log.warning("catalog_line_unreadable")
            return
        taken = self._view.catalog
        if self._connected and (catalog.epoch, catalog.version) < (taken.epoch, taken.version):
            return
        self._connected = True
        self._line = line
        self._view.take(catalog)

    def _on_down(self) -> None:
        self._connected = False
