"""The section ``tracing`` of the deployment file, and what it means for engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, structs

from policy.config.control import Positive, Seconds, Section
from policy.types import EngineKind

if TYPE_CHECKING:
    from policy.config.deployment import ModelSpec

# The path of traces below an endpoint of OTLP over HTTP (OpenTelemetry protocol specification).
TRACES_PATH = "/v1/traces"
_ARGUMENT = "otlp_traces_endpoint"
# vLLM sends OTLP over gRPC by default.
_ENGINE_ENV = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_SERVICE_NAME": "vllm"}


class Tracing(Section, frozen=True):
    """OpenTelemetry traces of requests, sent by OTLP over HTTP to ``endpoint``; none if that is empty.

    The fraction ``sample_ratio`` of the requests is traced, of those with a ``traceparent`` the ones that it
    says are sampled. Requests that fail by an error of the server are always traced, as are those whose first
    token comes after ``slow_ttft_s`` or whose end after ``slow_s``; ``None`` for no such limit. A worker
    sends at most ``max_rate`` traces a second.
    """

    endpoint: str = ""
    sample_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.01
    slow_ttft_s: Seconds | None = 10.0
    slow_s: Seconds | None = 60.0
    max_rate: Positive = 100


def traces_url(endpoint: str) -> str:
    """The URL that takes traces at ``endpoint``."""
    return endpoint.rstrip("/").removesuffix(TRACES_PATH) + TRACES_PATH


def traced(spec: ModelSpec, endpoint: str) -> ModelSpec:
    """``spec`` with vLLM engines that send their spans to ``endpoint``, unless its arguments say where to."""
    given = [spec.engine_args, *(shape.engine_args for shape in spec.shapes.values())]
    if spec.engine is not EngineKind.VLLM or any(_ARGUMENT in args for args in given):
        return spec
    args = {_ARGUMENT: traces_url(endpoint), **spec.engine_args}
    return structs.replace(spec, engine_args=args, env={**_ENGINE_ENV, **spec.env})
