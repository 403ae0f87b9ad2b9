"""The gRPC server of the endpoint picker: Envoy's external processing, and gRPC's health checks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from gateway.endpoint_picker.processor import Processor
from gateway.endpoint_picker.protocol import SERVICE, ProcessingRequest, ProcessingResponse
from gateway.request_pipeline import Gateway
from gateway.telemetry.structured_log import Log
from policy.config.endpoint_picker import EndpointPicker

_PROCESS = f"/{SERVICE}/Process"
_HEALTH = "/grpc.health.v1.Health/Check"
# HealthCheckResponse with status SERVING or NOT_SERVING, field 1 of one byte.
_SERVING, _NOT_SERVING = b"\x08\x01", b"\x08\x02"
_LIVENESS = b"liveness"
# Of one message: a body comes in pieces, and headers are short.
_MAX_MESSAGE = 4 * 1024 * 1024


class EndpointPickerServer:
    """Serves ``gateway`` to other proxies; several workers share the port."""

    def __init__(self, gateway: Gateway, config: EndpointPicker, log: Log) -> None:
        self._gateway = gateway
        self._config = config
        self._log = log
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Listen; raises ``RuntimeError`` if the port cannot be bound, ``OSError`` for unreadable files."""
        options = [("grpc.so_reuseport", 1), ("grpc.max_receive_message_length", _MAX_MESSAGE)]
        server = grpc.aio.server(options=options)
        server.add_generic_rpc_handlers((_Handlers(self._gateway, self._log),))
        host, config = self._config.host, self._config
        address = f"{f'[{host}]' if ':' in host else host}:{config.port}"
        if config.cert_file is not None and config.key_file is not None:
            server.add_secure_port(address, _credentials(config))
        else:
            server.add_insecure_port(address)
        await server.start()
        self._server = server
        self._log.info("endpoint_picker_started", address=address)

    async def drain(self, timeout_s: float) -> None:
        """Take no new requests, and give those that run ``timeout_s`` seconds."""
        if self._server is not None:
            await self._server.stop(timeout_s)


def _credentials(config: EndpointPicker) -> Any:
    pair = Path(str(config.key_file)).read_bytes(), Path(str(config.cert_file)).read_bytes()
    trusted = None if config.client_ca_file is None else Path(config.client_ca_file).read_bytes()
    return grpc.ssl_server_credentials([pair], trusted, require_client_auth=trusted is not None)


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """External processing, and gRPC's health checks, whose services the protocol names."""

    def __init__(self, gateway: Gateway, log: Log) -> None:
        self._gateway = gateway
        self._log = log

    def service(self, handler_call_details: Any) -> Any:
        if handler_call_details.method == _PROCESS:
            return grpc.stream_stream_rpc_method_handler(
                self._process,
                request_deserializer=ProcessingRequest.FromString,
                response_serializer=ProcessingResponse.SerializeToString,
            )
        if handler_call_details.method == _HEALTH:
            return grpc.unary_unary_rpc_method_handler(self._check)
        return None

    async def _process(self, incoming: AsyncIterator[Any], context: Any) -> None:
        try:
            await Processor(self._gateway, context.write).run(incoming)
        except Exception as error:
            self._log.error("endpoint_picker_failed", cause=error)
            raise

    async def _check(self, request: bytes, _context: Any) -> bytes:
        # The request's only field is the name of a service.
        if request[2:] == _LIVENESS:
            return _SERVING
        return _NOT_SERVING if self._gateway.not_ready() else _SERVING
