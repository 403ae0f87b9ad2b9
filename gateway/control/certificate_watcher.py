"""The TLS of the ports, whose certificate files are read again when they change."""

from __future__ import annotations

import ssl
from collections.abc import Callable

from gateway.port_certificate import PortCertificate
from gateway.telemetry.structured_log import StructuredLog
from policy.config.deployment import GatewayConfig
from store.tls_files import ports_with_tls, server_context

LOOK_EVERY_S = 1.0


class Certificates:
    """The certificates of the ports with TLS; raises :class:`policy.errors.ConfigError` for unfit files."""

    def __init__(self, gateway: GatewayConfig, log: StructuredLog) -> None:
        self._by_path = {
            path: PortCertificate(files, path, log, server_context)
            for path, files in ports_with_tls(gateway).items()
        }

    def of(self, path: str) -> Callable[[], ssl.SSLContext] | None:
        """The TLS of each next connection of the port whose section is at ``path``; ``None``: it has none."""
        found = self._by_path.get(path)
        return None if found is None else found.current

    def look(self) -> None:
        """Take the files that have changed."""
        for each in self._by_path.values():
            each.look()
