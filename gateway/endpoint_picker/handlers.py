"""The calls of the endpoint picker: Envoy's external processing, and gRPC's health checks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from gateway.endpoint_picker.ext_proc_messages import SERVICE, ProcessingRequest, ProcessingResponse
from gateway.endpoint_picker.processor import Processor
from gateway.http.upload_budget import UploadBudget
from gateway.request_pipeline import Gateway
from gateway.telemetry.structured_log import StructuredLog

_PROCESS = f"/{SERVICE}/Process"
_HEALTH = "/grpc.health.v1.Health/Check"
# HealthCheckResponse with status SERVING or NOT_SERVING, field 1 of one byte.
_SERVING, _NOT_SERVING = b"\x08\x01", b"\x08\x02"
_LIVENESS = b"liveness"


class EndpointPickerHandlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """External processing, and gRPC's health checks, whose services the protocol names."""

    def __init__(self, gateway: Gateway, uploads: UploadBudget, log: StructuredLog) -> None:
        self._gateway = gateway
        self._uploads = uploads
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
            await Processor(self._gateway, self._uploads, context.write).run(incoming)
        except Exception as error:
            self._log.error("endpoint_picker_failed", cause=error)
            raise

    async def _check(self, request: bytes, _context: Any) -> bytes:
        # The request's only field is the name of a service.
        if request[2:] == _LIVENESS:
            return _SERVING
        return _NOT_SERVING if self._gateway.not_ready() else _SERVING
