"""The deployment in the state directory, read again when its file changes."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from gateway.telemetry.structured_log import StructuredLog
from policy.config.deployment import Deployment
from policy.deployment_file.parse import parse
from policy.errors import ConfigError
from store.event_loop.timer_coalescing import sleep_to_next
from store.state_dir import StateDir
from store.watched_files import WatchedFiles

LOOK_EVERY_S = 0.5


class DeploymentWatcher:
    """The current deployment. A document that cannot be read leaves the last good one in force."""

    def __init__(self, state: StateDir, log: StructuredLog) -> None:
        self._path = state.deployment_path
        self._log = log
        self._file = WatchedFiles(self._path)
        self._file.changed()
        self.deployment = self._read()

    async def follow(self, on_change: Callable[[Deployment], None]) -> None:
        """Call ``on_change`` with each new document, until cancelled."""
        warned = False
        while True:
            await sleep_to_next(LOOK_EVERY_S)
            if not self._file.changed():
                warned = False
                continue
            try:
                self.deployment = self._read()
            except OSError as error:  # such as a lack of file descriptors: it is read again at the next look
                if not warned:
                    self._log.warning("document_unreadable", cause=error)
                warned = True
                continue
            except (ConfigError, ValueError) as error:
                self._log.error("document_refused", cause=error)
                continue
            self._log.info("document_read")
            on_change(self.deployment)

    def _read(self) -> Deployment:
        document = self._path.read_bytes()
        self._file.were_read()
        return parse(msgspec.json.decode(document))
