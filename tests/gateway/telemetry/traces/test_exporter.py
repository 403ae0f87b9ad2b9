"""What the exporter of traces does when it cannot send: the worker serves on, and later traces are sent."""

from __future__ import annotations

import asyncio
import json
import random
import resource
import subprocess
import sys
from typing import Any

from gateway.protocol.paths import ROUTES
from gateway.telemetry.traces.exporter import TraceExporter
from policy.config.tracing import Tracing
from tests.gateway.telemetry.test_scrape import served
from tests.gateway.worker import ROOT
from tests.otlp_receiver import receiving


def keep_a_trace(exporter: TraceExporter) -> None:
    tracer = exporter.tracer
    call: Any = served(
        10.0, ttft_s=1.0, route=ROUTES["/v1/completions"], outcome="upstream_failed", status=502,
        headers={}, streaming=False, usage=None, trace=tracer.begin({}),
    )  # fmt: skip
    tracer.end(call, "m", "", 10.0, 12.0)


async def flush_without_descriptors_and_with(url: str) -> None:
    """In a process of its own: print what was lost of two traces, and the types of the errors."""
    told: list[tuple[int, str]] = []

    def tell(count: int, cause: Exception | None) -> None:
        told.append((count, type(cause).__name__))

    exporter = TraceExporter(0, random.Random(7), tell)  # noqa: S311
    exporter.tracer.read(Tracing(endpoint=url, sample_ratio=0.0))
    await asyncio.to_thread(int)  # the thread is there
    keep_a_trace(exporter)
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, usual[1]))
    await exporter.flush()
    resource.setrlimit(resource.RLIMIT_NOFILE, usual)
    keep_a_trace(exporter)
    await exporter.close()
    print(json.dumps([told, "opentelemetry.sdk" in sys.modules]))  # noqa: T201 - its result


def test_a_first_export_without_file_descriptors_loses_its_traces_alone() -> None:
    """It imports the SDK, which is no reason to end a worker that lacks descriptors."""
    with receiving() as receiver:
        script = (
            "import asyncio; from tests.gateway.telemetry.traces import test_exporter as test;"
            f"asyncio.run(test.flush_without_descriptors_and_with({receiver.url!r}))"
        )
        ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, check=False)
        assert ended.returncode == 0, ended.stderr.decode()
        assert len([span for span in receiver.spans if span.name.startswith("POST")]) == 1
    assert json.loads(ended.stdout) == [[[1, "OSError"]], True]
