"""A gRPC port that gateway workers share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc

from gateway.telemetry.structured_log import StructuredLog
from policy.config.grpc_ports import GrpcPort
from policy.errors import ConfigError
from store.tls_files import server_context, tls_of
from store.watched_files import WatchedFiles

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
            server.add_secure_port(address, _Certificate(self._name, config, self._log).credentials())
        else:
            server.add_insecure_port(address)
        await server.start()
        self._server = server
        self._log.info(f"{self._name}_started", address=address)

    async def drain(self, timeout_s: float) -> None:
        """Take no new calls, and give those that run ``timeout_s`` seconds."""
        if self._server is not None:
            await self._server.stop(0 if self._watch else timeout_s)


class _Certificate:
    """The certificate of a port. Changed files that do not fit leave the last in force, and are logged."""

    def __init__(self, path: str, config: GrpcPort, log: StructuredLog) -> None:
        self._path = path
        self._files = tls_of(config)
        self._log = log
        named = (config.cert_file, config.key_file, config.client_ca_file)
        self._watched = WatchedFiles(*(file for file in named if file is not None))

    def credentials(self) -> Any:
        """The port's; raises :class:`policy.errors.ConfigError` for unfit files."""
        self._watched.changed()
        self._watched.were_read()
        mutual = self._files.client_ca_file is not None
        return grpc.dynamic_ssl_server_credentials(self._read(), self._look, mutual)

    def _look(self) -> Any:
        """Those of the next connection, if the files have changed; gRPC asks in a thread of its own."""
        if not self._watched.changed():
            return None
        self._watched.were_read()
        try:
            read = self._read()
        except (ConfigError, OSError) as error:
            path = error.path if isinstance(error, ConfigError) else self._path
            self._log.error("certificate_refused", cause=error, path=path)
            return None
        self._log.info("certificate_read", path=self._path)
        return read

    def _read(self) -> Any:
        files = self._files
        # gRPC takes anything, and then closes each connection.
        server_context(files, self._path)
        pair = Path(files.key_file).read_bytes(), Path(files.cert_file).read_bytes()
        trusted = None if files.client_ca_file is None else Path(files.client_ca_file).read_bytes()
        return grpc.ssl_server_certificate_configuration([pair], trusted)
