"""What the section ``tracing`` of the deployment file means for vLLM engines."""

from __future__ import annotations

from msgspec import structs

from policy.config.deployment import ModelSpec
from policy.config.tracing import traces_url
from policy.types import EngineKind

_ARGUMENT = "otlp_traces_endpoint"
# vLLM sends OTLP over gRPC by default.
_ENGINE_ENV = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_SERVICE_NAME": "vllm"}


def traced(spec: ModelSpec, endpoint: str) -> ModelSpec:
    """``spec`` with vLLM engines that send their spans to ``endpoint``, unless its arguments say where to."""
    given = [spec.engine_args, *(shape.engine_args for shape in spec.shapes.values())]
    if spec.engine is not EngineKind.VLLM or any(_ARGUMENT in args for args in given):
        return spec
    args = {_ARGUMENT: traces_url(endpoint), **spec.engine_args}
    return structs.replace(spec, engine_args=args, env={**_ENGINE_ENV, **spec.env})
