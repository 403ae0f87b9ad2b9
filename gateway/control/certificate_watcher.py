"""The TLS of the ports, whose certificate files are read again when they change."""

from __future__ import annotations

import ssl
from collections.abc import Callable

from gateway.telemetry.structured_log import StructuredLog
from policy.config.deployment import GatewayConfig
from policy.config.tls import AdminTls, ServerTls
from policy.errors import ConfigError
from store.tls_files import ports_with_tls, server_context
from store.watched_files import WatchedFiles

LOOK_EVERY_S = 1.0


class Certificates:
    """The certificates of the ports with TLS; raises :class:`policy.errors.ConfigError` for unfit files."""

    def __init__(self, gateway: GatewayConfig, log: StructuredLog) -> None:
        self._by_path = {
            path: Certificate(files, path, log) for path, files in ports_with_tls(gateway).items()
        }

    def of(self, path: str) -> Callable[[], ssl.SSLContext] | None:
        """The TLS of each next connection of the port whose section is at ``path``; ``None``: it has none."""
        found = self._by_path.get(path)
        return None if found is None else found.context

    def look(self) -> None:
        """Take the files that have changed."""
        for each in self._by_path.values():
            each.look()


class Certificate:
    """The certificate of one port. Changed files that do not fit leave the last in force, and are logged."""

    def __init__(self, files: ServerTls, path: str, log: StructuredLog) -> None:
        self._files = files
        self._path = path
        self._log = log
        named: list[str | None] = [files.cert_file, files.key_file]
        if isinstance(files, AdminTls):
            named.append(files.client_ca_file)
        self._watched = WatchedFiles(*(file for file in named if file is not None))
        self._watched.changed()
        self._watched.were_read()
        self._context = server_context(files, path)

    def context(self) -> ssl.SSLContext:
        """That of the next connection."""
        return self._context

    def look(self) -> None:
        """Take the files if they have changed."""
        if not self._watched.changed():
            return
        self._watched.were_read()
        try:
            self._context = server_context(self._files, self._path)
        except ConfigError as error:
            self._log.error("certificate_refused", cause=error, path=error.path)
        else:
            self._log.info("certificate_read", path=self._path)
