"""A gRPC port that gateway workers share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc

from gateway.telemetry.structured_log import StructuredLog
from policy.config.grpc_ports import GrpcPort

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
        """Listen; raises ``RuntimeError`` if the port cannot be bound, ``OSError`` for unreadable files."""
        options = [("grpc.so_reuseport", 1), ("grpc.max_receive_message_length", _MAX_MESSAGE)]
        server = grpc.aio.server(options=options)
        server.add_generic_rpc_handlers((self._handlers,))
        host, config = self._config.host, self._config
        address = f"{f'[{host}]' if ':' in host else host}:{config.port}"
        if config.cert_file is not None and config.key_file is not None:
            server.add_secure_port(address, _credentials(config))
        else:
            server.add_insecure_port(address)
        await server.start()
        self._server = server
        self._log.info(f"{self._name}_started", address=address)

    async def drain(self, timeout_s: float) -> None:
        """Take no new calls, and give those that run ``timeout_s`` seconds."""
        if self._server is not None:
            await self._server.stop(0 if self._watch else timeout_s)


def _credentials(config: GrpcPort) -> Any:
    pair = Path(str(config.key_file)).read_bytes(), Path(str(config.cert_file)).read_bytes()
    trusted = None if config.client_ca_file is None else Path(config.client_ca_file).read_bytes()
    return grpc.ssl_server_credentials([pair], trusted, require_client_auth=trusted is not None)
