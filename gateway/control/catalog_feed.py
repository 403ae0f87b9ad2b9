"""Follow the controller's catalog of adapters, and keep the last one on disk for when it is away."""

from __future__ import annotations

import asyncio

import msgspec

from gateway.http.ndjson import NdjsonStream
from gateway.intake.adapter_catalog import CatalogView
from gateway.telemetry.log import Log
from policy.wire.catalog import Alias, Catalog
from policy.wire.controller import ADAPTERS_STREAM
from store.state_dir import StateDir, write_atomic

SAVE_EVERY_S = 1.0


class _Line(msgspec.Struct):
    """A catalog whose aliases are not decoded yet."""

    epoch: float
    version: int
    aliases: tuple[msgspec.Raw, ...] = ()


_LINE = msgspec.json.Decoder(_Line)
_ALIAS = msgspec.json.Decoder(Alias)


class CatalogFeed:
    """The stream of catalogs of one controller.

    The first of a connection is always taken, since the controller is the authority even when its clock went
    back; after it only newer ones are. Of thousands of aliases one changes at a time, and that alone
    is decoded: the others would cost tens of milliseconds, in which no stream moves.
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
        self._connected = False
        self._line = b""
        self._kept = b""
        self._aliases: dict[bytes, Alias] = {}
        self.feed = NdjsonStream(
            f"http://{address}",
            ADAPTERS_STREAM,
            state.secret(),
            connect_timeout_s,
            on_line=self._on_line,
            on_down=self._on_down,
        )

    def start_from_disk(self) -> None:
        """Serve on with the last catalog until the controller answers."""
        if self._view.known:
            return
        try:
            line = self._state.catalog_path.read_bytes()
            self._view.take(self._read(line))
        except FileNotFoundError:
            return
        except ValueError:
            self._log.warning("catalog_file_unreadable")
        else:
            self._line = self._kept = line

    async def keep_on_disk(self) -> None:
        """Write each new version, at most once a second; one worker of a host does."""
        while True:
            await asyncio.sleep(SAVE_EVERY_S)
            line = self._line
            if line == self._kept:
                continue
            try:
                await asyncio.to_thread(write_atomic, self._state.catalog_path, line, 0o600)
                self._kept = line
            except OSError as error:
                self._log.warning("catalog_not_saved", error=type(error).__name__)

    def _on_line(self, line: bytes) -> None:
        if line == self._line:  # as most are: the controller lives
            self._connected = True
            return
        try:
            catalog = self._read(line)
        except ValueError:
            self._log.warning("catalog_line_unreadable")
            return
        taken = self._view.catalog
        if self._connected and (catalog.epoch, catalog.version) < (taken.epoch, taken.version):
            return
        self._connected = True
        self._line = line
        self._view.take(catalog)

    def _read(self, line: bytes) -> Catalog:
        said = _LINE.decode(line)
        former = self._aliases
        aliases = {raw: former.get(raw) or _ALIAS.decode(raw) for raw in map(bytes, said.aliases)}
        self._aliases = aliases
        return Catalog(epoch=said.epoch, version=said.version, aliases=tuple(aliases.values()))

    def _on_down(self) -> None:
        self._connected = False
