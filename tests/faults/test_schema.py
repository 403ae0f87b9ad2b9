"""Row 57: requests generated from the published schema get no 5xx, and answers that match the schema."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from tests.faults.harness import POOLING, Harness
from tests.gateway.fake_replica import DONE, Exchange, event

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]
CASES = 2000


async def engine(exchange: Exchange) -> None:
    """An engine of any route: a stream or an object, as vLLM answers."""
    if exchange.json.get("stream") and exchange.path not in ("/tokenize", "/detokenize"):
        stream = event("a") + event(finish="stop") + DONE
        await exchange.reply(stream, content_type="text/event-stream")
    else:
        await exchange.reply(b"{}")


@pytest.mark.parametrize(
    "cases", [40, pytest.param(CASES, marks=[pytest.mark.long, pytest.mark.timeout(1800)])]
)
async def test_57_generated_requests_get_valid_answers(harness: Harness, model: str, cases: int) -> None:
    upstreams = [harness.upstream(name, usual=engine) for name in (model, POOLING)]
    for upstream in upstreams:
        await upstream.start()
    await harness.ready(*upstreams)
    document = (await harness.http.get("/openapi.json")).json()
    api = schemathesis.openapi.from_dict(document)
    operations = [found.ok() for found in api.get_all_operations()]

    def check(operation: Any) -> None:
        modes = list(schemathesis.GenerationMode)
        strategy = st.one_of(operation.as_strategy(generation_mode=mode) for mode in modes)

        @settings(max_examples=cases // len(operations), suppress_health_check=list(HealthCheck))
        @given(case=strategy, existing=st.sampled_from(["", model, POOLING]))
        def send(case: Any, existing: str) -> None:
            if existing and isinstance(case.body, dict):
                case.body["model"] = existing
            response = case.call(base_url=harness.url, timeout=60)
            assert response.status_code < 500, (response.status_code, response.text, case.as_curl_command())
            case.validate_response(response, checks=[content_type_conformance])
            # Schemathesis compares each event with the schema, which describes the whole stream.
            if "text/event-stream" not in str(response.headers.get("content-type")):
                case.validate_response(response, checks=[response_schema_conformance])

        send()

    for operation in operations:
        await asyncio.to_thread(check, operation)
