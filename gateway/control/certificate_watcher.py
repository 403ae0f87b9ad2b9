"""The TLS of the ports, whose certificate files are read again when they change."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path

from gateway.telemetry.structured_log import Log
from policy.config.deployment import GatewayConfig
from policy.config.tls import AdminTls, ServerTls
from policy.errors import ConfigError
from store.tls_files import ports_with_tls, server_context

LOOK_EVERY_S = 1.0

Signature = tuple[tuple[int, int, int] | None, ...]


class Certificates:
    """The certificates of the ports with TLS; raises :class:`policy.errors.ConfigError` for unfit files."""

    def __init__(self, gateway: GatewayConfig, log: Log) -> None:
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

    def __init__(self, files: ServerTls, path: str, log: Log) -> None:
        self._files = files
        self._path = path
        self._log = log
        self._seen = self._signature()
        self._context = server_context(files, path)

    def context(self) -> ssl.SSLContext:
        """That of the next connection."""
        return self._context

    def look(self) -> None:
        """Take the files if they have changed."""
        if (now := self._signature()) == self._seen:
            return
        self._seen = now
        try:
            self._context = server_context(self._files, self._path)
        except ConfigError as error:
            self._log.error("certificate_refused", cause=error, path=error.path)
        else:
            self._log.info("certificate_read", path=self._path)

    def _signature(self) -> Signature:
        files: list[str | None] = [self._files.cert_file, self._files.key_file]
        if isinstance(self._files, AdminTls):
            files.append(self._files.client_ca_file)
        return tuple(_stat(file) for file in files if file is not None)


def _stat(file: str) -> tuple[int, int, int] | None:
    try:
        stat = Path(file).stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size
