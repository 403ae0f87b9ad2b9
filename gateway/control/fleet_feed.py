"""Follow the controller's fleet, and keep the last one on disk for when it is away."""

from __future__ import annotations

import asyncio

import msgspec

from gateway.http.ndjson import NdjsonStream
from gateway.routing.fleet import FleetView
from gateway.telemetry.log import Log
from policy.types import Fleet
from policy.wire.controller import FLEET_STREAM
from store.state_dir import StateDir

SAVE_EVERY_S = 1.0


class FleetFeed:
    """The stream of snapshots of one controller.

    The first snapshot of a connection is always taken, since the controller is the authority even
    when its clock went back; after it only newer ones are.
    """

    def __init__(
        self,
        address: str,
        state: StateDir,
        view: FleetView,
        log: Log,
        *,
        connect_timeout_s: float,
    ) -> None:
        self._state = state
        self._view = view
        self._log = log
        self._decoder = msgspec.json.Decoder(Fleet)
        self._connected = False
        self._kept: Fleet | None = None
        self._clock = asyncio.get_running_loop().time
        self.feed = NdjsonStream(
            f"http://{address}",
            FLEET_STREAM,
            state.secret(),
            connect_timeout_s,
            on_line=self._on_line,
            on_down=self._on_down,
        )

    def start_from_disk(self) -> None:
        """Serve on with the last fleet until the controller answers."""
        try:
            fleet = self._state.load(self._state.fleet_path, Fleet)
        except ValueError:
            self._log.warning("fleet_file_unreadable")
            return
        self._kept = fleet
        if fleet is not None and self._view.source == "none":
            self._view.take(fleet, "disk", self._clock())

    async def keep_on_disk(self) -> None:
        """Write each new version, at most once a second; one worker of a host does."""
        while True:
            await asyncio.sleep(SAVE_EVERY_S)
            fleet = self._view.fleet
            if self._view.source != "controller" or not worth_keeping(fleet, self._kept):
                continue
            try:
                await asyncio.to_thread(self._state.save, self._state.fleet_path, fleet)
                self._kept = fleet
            except OSError as error:
                self._log.warning("fleet_not_saved", error=type(error).__name__)

    def _on_line(self, line: bytes) -> None:
        try:
            fleet = self._decoder.decode(line)
        except ValueError:
            self._log.warning("fleet_line_unreadable")
            return
        if self._connected and self._view.fleet.newer_than(fleet):
            return
        if not self._connected:
            self._connected = True
            self._log.info("controller_seen", epoch=fleet.epoch, version=fleet.version)
        self._view.take(fleet, "controller", self._clock())

    def _on_down(self) -> None:
        if self._connected:
            self._connected = False
            self._log.warning("controller_lost")


def worth_keeping(fleet: Fleet, kept: Fleet | None) -> bool:
    """Whether ``fleet`` should stand on disk in place of ``kept``.

    A controller that has just started knows of no replica until their hosts have told it: its empty
    fleet says nothing, and only one that had replicas itself can say that they are gone.
    """
    if kept is None:
        return True
    if (fleet.epoch, fleet.version) == (kept.epoch, kept.version):
        return False
    return bool(fleet.replicas) or not kept.replicas or fleet.epoch == kept.epoch
