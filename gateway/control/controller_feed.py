"""The documents that the controller streams, fleet and adapter catalog, with their last copies on disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from gateway.http.ndjson_client import NdjsonStream
from gateway.intake.adapter_catalog import CatalogView
from gateway.routing.fleet import FleetView
from gateway.telemetry.structured_log import StructuredLog
from policy.types import FleetSnapshot
from policy.wire.adapter_catalog import Alias, CatalogSnapshot
from policy.wire.controller import ADAPTERS_STREAM, FLEET_STREAM, Controllers
from store.event_loop.timer_coalescing import sleep_to_next
from store.state_dir import StateDir, write_atomic

SAVE_EVERY_S = 1.0


Document = TypeVar("Document", FleetSnapshot, CatalogSnapshot)


@dataclass(eq=False)
class ControllerFeed(Generic[Document]):
    """One document, followed while the controller answers and read from ``file`` until it does.

    A document's ``epoch`` is the start of its controller; ``version`` orders documents within an epoch. The
    first document of a connection is always taken, whatever the controller's clock; after it, older ones are
    ignored. Those of a controller that was deposed always are. ``take`` gets each document and whether it is
    from disk; ``replaces`` decides whether a document replaces the saved one.
    """

    name: str
    urls: Sequence[str]
    path: str
    file: Path
    secret: str
    log: StructuredLog
    connect_timeout_s: float
    decode: Callable[[bytes], Document]
    take: Callable[[Document, bool], None]
    replaces: Callable[[Document, Document], bool]

    def __post_init__(self) -> None:
        self._connected = False
        self._last: tuple[Document, bytes] | None = None
        self._on_disk: Document | None = None
        self.stream = NdjsonStream(
            self.urls,
            self.path,
            self.secret,
            self.connect_timeout_s,
            on_line=self.receive,
            on_down=self.disconnected,
        )

    def start_from_disk(self) -> None:
        """Take the last document from disk, if there is one, until the controller answers."""
        if self._last is not None:
            return
        try:
            document = self.decode(self.file.read_bytes())
        except FileNotFoundError:
            return
        except ValueError:
            self.log.warning(f"{self.name}_file_unreadable")
            return
        self._on_disk = document
        self.take(document, True)

    async def keep_on_disk(self) -> None:
        """Save new versions, at most one a second, until cancelled; one worker of a host does."""
        while True:
            await sleep_to_next(SAVE_EVERY_S)
            if self._last is None:
                continue
            document, line = self._last
            if self._on_disk is not None and not self.replaces(document, self._on_disk):
                continue
            try:
                await asyncio.to_thread(write_atomic, self.file, line, 0o600)
                self._on_disk = document
            except OSError as error:
                self.log.warning(f"{self.name}_not_saved", cause=error)

    def receive(self, line: bytes) -> None:
        try:
            document = self.decode(line)
        except ValueError:
            self.log.warning(f"{self.name}_line_unreadable")
            return
        last = self._last
        if last is not None and document.term < last[0].term:
            return
        if self._connected and last is not None and _order(document) < _order(last[0]):
            return
        if not self._connected:
            self._connected = True
            self.log.info(
                f"{self.name}_connected", epoch=document.epoch, version=document.version, term=document.term
            )
        self._last = (document, line)
        self.take(document, False)

    def disconnected(self) -> None:
        """The stream broke; the document stays in force."""
        if self._connected:
            self._connected = False
            self.log.warning(f"{self.name}_disconnected")


def _order(document: FleetSnapshot | CatalogSnapshot) -> tuple[int, float, int]:
    return document.term, document.epoch, document.version


def _urls(controllers: str) -> list[str]:
    return [f"http://{address}" for address in Controllers(controllers).all]


def fleet_feed(
    address: str, state: StateDir, view: FleetView, log: StructuredLog, *, connect_timeout_s: float
) -> ControllerFeed[FleetSnapshot]:
    """The fleet's snapshots, into ``view``."""
    clock = asyncio.get_running_loop().time

    def take(fleet: FleetSnapshot, from_disk: bool) -> None:
        view.take(fleet, "disk" if from_disk else "controller", clock())

    return ControllerFeed(
        "fleet",
        _urls(address),
        FLEET_STREAM,
        state.fleet_path,
        state.secret(),
        log,
        connect_timeout_s,
        decode=msgspec.json.Decoder(FleetSnapshot).decode,
        take=take,
        replaces=fleet_replaces,
    )


def fleet_replaces(fleet: FleetSnapshot, saved: FleetSnapshot) -> bool:
    """Whether ``fleet`` is saved in place of ``saved``.

    An empty fleet counts only from a controller that had replicas: one that has just started knows none yet.
    """
    if _order(fleet) == _order(saved):
        return False
    return bool(fleet.replicas) or not saved.replicas or fleet.epoch == saved.epoch


def catalog_feed(
    address: str, state: StateDir, view: CatalogView, log: StructuredLog, *, connect_timeout_s: float
) -> ControllerFeed[CatalogSnapshot]:
    """The adapter catalog, into ``view``."""
    return ControllerFeed(
        "catalog",
        _urls(address),
        ADAPTERS_STREAM,
        state.catalog_path,
        state.secret(),
        log,
        connect_timeout_s,
        decode=CatalogDecoder().decode,
        take=lambda catalog, _: view.take(catalog),
        replaces=lambda catalog, saved: _order(catalog) != _order(saved),
    )


class _RawCatalog(msgspec.Struct):
    """A catalog whose aliases are not decoded yet."""

    epoch: float
    version: int
    aliases: tuple[msgspec.Raw, ...] = ()
    term: int = 0


class CatalogDecoder:
    """Decodes only changed aliases: decoding thousands would block the event loop for tens of ms."""

    def __init__(self) -> None:
        self._raw = msgspec.json.Decoder(_RawCatalog)
        self._alias = msgspec.json.Decoder(Alias)
        self._line: bytes | None = None
        self._catalog = CatalogSnapshot(epoch=0.0, version=0)
        self.aliases: dict[bytes, Alias] = {}

    def decode(self, line: bytes) -> CatalogSnapshot:
        """The catalog in ``line``; raises ``ValueError`` if it is none."""
        if line != self._line:
            raw = self._raw.decode(line)
            former = self.aliases
            self.aliases = {
                alias: former.get(alias) or self._alias.decode(alias) for alias in map(bytes, raw.aliases)
            }
            self._catalog = CatalogSnapshot(
                epoch=raw.epoch, version=raw.version, aliases=tuple(self.aliases.values()), term=raw.term
            )
            self._line = line
        return self._catalog
