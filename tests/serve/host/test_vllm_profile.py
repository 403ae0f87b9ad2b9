"""A trace of a real vLLM engine names the operators of its steps, and two cannot be recorded at a time."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path

import httpx
import pytest

from policy.wire.headers import SECRET_HEADER
from policy.wire.load_stream import PROFILE
from tests.serve.engine.vllm_host import WITHIN_S, running

pytest.importorskip("vllm", reason="vLLM is not installed")

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.long]


async def test_a_trace_has_the_operators_of_the_steps(tmp_path: Path) -> None:
    body = {"model": "smollm2", "prompt": "tide", "max_tokens": 60, "ignore_eos": True}
    async with running() as (host, _):
        client = httpx.AsyncClient(
            base_url=host.snapshot().url, headers={SECRET_HEADER: "s"}, timeout=WITHIN_S, trust_env=False
        )
        async with client as http:
            for _ in range(2):  # the profiler can be used again
                first, second, answer = await asyncio.gather(
                    http.post(f"{PROFILE}?seconds=2"),
                    http.post(f"{PROFILE}?seconds=1"),
                    http.post("/v1/completions", json=body),
                )
                assert answer.status_code == 200
                assert sorted((first.status_code, second.status_code)) == [200, 409]
                trace = first if first.status_code == 200 else second
                events = json.loads(gzip.decompress(trace.content))["traceEvents"]
                names = {event.get("name", "") for event in events}
                assert any("linear" in name or "mm" in name for name in names), sorted(names)[:50]
                print(f"{len(trace.content)} B, {len(events)} events")  # noqa: T201 - what docs may say
