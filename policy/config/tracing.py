"""The section ``tracing`` of the deployment file."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from policy.config.control import Positive, Seconds, Section

# The path of traces below an endpoint of OTLP over HTTP (OpenTelemetry protocol specification).
TRACES_PATH = "/v1/traces"


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
