"""Follow the controller's fleet, and keep the last one on disk for when it is away."""

from __future__ import annotations

import asyncio

import msgspec

from gateway.feed import Feed
from gateway.fleet import FleetView
from gateway.log import Log
from policy.types import Fleet
from store.state import StateDir

SAVE_EVERY_S = 1.0


class FleetSource:
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
        self._clock = asyncio.get_running_loop().time
        self.feed = Feed(
            f"http://{address}",
            "/fleet/stream",
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
        if fleet is not None and self._view.source == "none":
            self._view.take(fleet, "disk", self._clock())

    async def keep_on_disk(self) -> None:
        """Write each new version, at most once a second; one worker of a host does."""
        saved: tuple[float, int] | None = None
        while True:
            await asyncio.sleep(SAVE_EVERY_S)
            fleet = self._view.fleet
            version = (fleet.epoch, fleet.version)
            if self._view.source != "controller" or version == saved:
                continue
            try:
                await asyncio.to_thread(self._state.save, self._state.fleet_path, fleet)
                saved = version
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
