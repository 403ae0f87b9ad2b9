"""A gRPC port that gateway workers share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc

from gateway.port_certificate import PortCertificate
from gateway.telemetry.structured_log import StructuredLog
from policy.config.grpc_ports import GrpcPort
from policy.config.tls import AdminTls, ServerTls
from store.tls_files import server_context, tls_of

# Of one message: a body comes in pieces, and headers are short.
_MAX_MESSAGE = 4 * 1024 * 1024


class GrpcServer:
    """Serves ``handlers`` at the port of the section ``name``.

    Calls that ``watch`` have no end, and are not waited for.
    """

    def __init__(
        self, name: str, config: GrpcPort, handlers: Any, log: StructuredLog, *, watch: bool = False
    ) -> None:
        self._name = name
        self._config = config
        self._handlers = handlers
        self._log = log
        self._watch = watch
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Listen; raises ``RuntimeError`` if the port cannot be bound.

        Raises :class:`policy.errors.ConfigError` for certificate files that do not fit.
        """
        options = [("grpc.so_reuseport", 1), ("grpc.max_receive_message_length", _MAX_MESSAGE)]
        server = grpc.aio.server(options=options)
        server.add_generic_rpc_handlers((self._handlers,))
        host, config = self._config.host, self._config
        address = f"{f'[{host}]' if ':' in host else host}:{config.port}"
        if config.cert_file is not None:
            server.add_secure_port(address, _credentials(self._name, config, self._log))
        else:
            server.add_insecure_port(address)
        await server.start()
        self._server = server
        self._log.info(f"{self._name}_started", address=address)

    async def drain(self, timeout_s: float) -> None:
        """Take no new calls, and give those that run ``timeout_s`` seconds."""
        if self._server is not None:
            await self._server.stop(0 if self._watch else timeout_s)


def _credentials(name: str, config: GrpcPort, log: StructuredLog) -> Any:
    """Those of a port with TLS; gRPC asks for new ones before each connection, in a thread of its own."""
    files = tls_of(config)
    certificate = PortCertificate(files, name, log, _configuration)
    mutual = files.client_ca_file is not None
    return grpc.dynamic_ssl_server_credentials(
        certificate.current(), lambda: certificate.current() if certificate.look() else None, mutual
    )


def _configuration(files: ServerTls, path: str) -> Any:
    # gRPC takes anything, and then closes each connection.
    server_context(files, path)
    pair = Path(files.key_file).read_bytes(), Path(files.cert_file).read_bytes()
    ca_file = files.client_ca_file if isinstance(files, AdminTls) else None
    return grpc.ssl_server_certificate_configuration([pair], ca_file and Path(ca_file).read_bytes())
