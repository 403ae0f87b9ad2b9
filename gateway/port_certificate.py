"""The certificate of a port, whose files are read again when they change."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from gateway.telemetry.structured_log import StructuredLog
from policy.config.tls import AdminTls, ServerTls
from policy.errors import ConfigError
from store.watched_files import WatchedFiles

T = TypeVar("T")


class PortCertificate(Generic[T]):
    """What ``load`` makes of the files of the port whose section is at ``path``.

    Changed files that do not fit leave the last in force, and are logged. One that cannot be read is tried
    again at the next look. Raises :class:`policy.errors.ConfigError` if the first do not fit.
    """

    def __init__(
        self, files: ServerTls, path: str, log: StructuredLog, load: Callable[[ServerTls, str], T]
    ) -> None:
        self._files = files
        self._path = path
        self._log = log
        self._load = load
        named: list[str | None] = [files.cert_file, files.key_file]
        if isinstance(files, AdminTls):
            named.append(files.client_ca_file)
        # gRPC looks in threads of its own.
        self._looking = threading.Lock()
        self._watched = WatchedFiles(*(file for file in named if file is not None))
        self._watched.changed()
        self._watched.were_read()
        self._warned = False
        self._loaded = load(files, path)

    def current(self) -> T:
        """For the next connection."""
        return self._loaded

    def look(self) -> bool:
        """Take the files if they have changed; returns whether they were taken."""
        with self._looking:
            if not self._watched.changed():
                self._warned = False
                return False
            try:
                self._loaded = self._load(self._files, self._path)
            except (ConfigError, OSError) as error:
                unread = _is_unread(error)
                if not unread:
                    self._watched.were_read()
                if not (unread and self._warned):
                    path = error.path if isinstance(error, ConfigError) else self._path
                    self._log.error("certificate_refused", cause=error, path=path)
                self._warned = unread
                return False
            self._watched.were_read()
        self._log.info("certificate_read", path=self._path)
        return True


def _is_unread(error: BaseException) -> bool:
    """Whether a file could not be read, such as for a lack of descriptors: no change of it need follow."""
    cause = error.__cause__ if isinstance(error, ConfigError) else error
    return isinstance(cause, OSError) and not isinstance(cause, ssl.SSLError)
