"""KEDA's external scaler (``externalscaler.ExternalScaler``): a metric whose value is the desired count.

A ScaledObject names the ``model`` in its trigger's metadata, and the ``shape`` if it scales one of several.
Source: ``pkg/scalers/externalscaler/externalscaler.proto`` of KEDA 2.17.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from gateway.grpc_server.protobuf_declarations import declare
from gateway.routing.external_autoscaler_counts import METRIC, CountUnknown, desired_count
from gateway.routing.fleet import FleetView

SERVICE = "externalscaler.ExternalScaler"
# How soon KEDA hears of a model that leaves 0.
LOOK_EVERY_S = 0.2

_REF = ("scaledObjectRef", 1, "ScaledObjectRef")
_MESSAGES = declare(
    "external_scaler",
    {
        # A map is a repeated entry on the wire.
        "Metadata": [("key", 1, "string"), ("value", 2, "string")],
        "ScaledObjectRef": [
            ("name", 1, "string"),
            ("namespace", 2, "string"),
            ("scalerMetadata", 3, "*Metadata"),
        ],
        "IsActiveResponse": [("result", 1, "bool")],
        "MetricSpec": [
            ("metricName", 1, "string"),
            ("targetSize", 2, "int64"),
            ("targetSizeFloat", 3, "double"),
        ],
        "GetMetricSpecResponse": [("metricSpecs", 1, "*MetricSpec")],
        "GetMetricsRequest": [_REF, ("metricName", 2, "string")],
        "MetricValue": [
            ("metricName", 1, "string"),
            ("metricValue", 2, "int64"),
            ("metricValueFloat", 3, "double"),
        ],
        "GetMetricsResponse": [("metricValues", 1, "*MetricValue")],
    },
)
_SPEC = {"metricName": METRIC, "targetSize": 1, "targetSizeFloat": 1.0}


class ExternalScalerHandlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers from ``view``; what is not known is an error, at which KEDA keeps the count or falls back."""

    def __init__(self, view: FleetView) -> None:
        self._view = view
        ref, request = _MESSAGES["ScaledObjectRef"], _MESSAGES["GetMetricsRequest"]
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        self._methods = {
            f"/{SERVICE}/{name}": kind(
                call,
                request_deserializer=asked.FromString,
                response_serializer=lambda message: message.SerializeToString(),
            )
            for name, kind, asked, call in (
                ("IsActive", unary, ref, self._is_active),
                ("StreamIsActive", stream, ref, self._stream_is_active),
                ("GetMetricSpec", unary, ref, self._spec),
                ("StreamMetricSpec", stream, ref, self._stream_spec),
                ("GetMetrics", unary, request, self._metrics),
            )
        }

    def service(self, handler_call_details: Any) -> Any:
        return self._methods.get(handler_call_details.method)

    async def _is_active(self, ref: Any, context: Any) -> Any:
        return _active(await self._count(ref, context))

    async def _stream_is_active(self, ref: Any, context: Any) -> AsyncIterator[Any]:
        """At once, and at each change."""
        before = None
        while True:
            active = await self._count(ref, context) > 0
            if active is not before:
                yield _active(active)
            before = active
            await asyncio.sleep(LOOK_EVERY_S)

    async def _spec(self, ref: Any, context: Any) -> Any:
        await self._count(ref, context)
        return _MESSAGES["GetMetricSpecResponse"](metricSpecs=[_SPEC])

    async def _stream_spec(self, ref: Any, context: Any) -> AsyncIterator[Any]:
        """Once: one of the metric is one replica, always."""
        yield await self._spec(ref, context)
        await asyncio.Event().wait()

    async def _metrics(self, request: Any, context: Any) -> Any:
        count = await self._count(request.scaledObjectRef, context)
        value = {"metricName": METRIC, "metricValue": count, "metricValueFloat": float(count)}
        return _MESSAGES["GetMetricsResponse"](metricValues=[value])

    async def _count(self, ref: Any, context: Any) -> int:
        metadata = {each.key: each.value for each in ref.scalerMetadata}
        try:
            if not (model := metadata.get("model", "")):
                raise CountUnknown(
                    f"the trigger of {ref.namespace}/{ref.name} has no `model` in its metadata"
                )
            return desired_count(self._view, model, metadata.get("shape", ""))
        except CountUnknown as unknown:
            code = grpc.StatusCode.UNAVAILABLE if self._view.source == "none" else grpc.StatusCode.NOT_FOUND
            await context.abort(code, str(unknown))
            raise


def _active(result: int) -> Any:
    return _MESSAGES["IsActiveResponse"](result=bool(result))
