"""Random combinations of all parameters on two replicas of real vLLM: no request ends an engine."""

from __future__ import annotations

import asyncio
import importlib
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from gateway.protocol.body import STEERING
from tests.e2e.adapters import make
from tests.e2e.conftest import CHAT
from tests.e2e.random_requests import ENDPOINTS, Request, draw
from tests.e2e.stack import ROOT, Stack, running
from tests.e2e.traffic import PATIENCE_S

REQUESTS = 500
AT_ONCE = 12
SEED = random.SystemRandom().randrange(2**32)
PROTOCOLS = {
    "/completions": "openai.completion.protocol:CompletionRequest",
    "/chat/completions": "openai.chat_completion.protocol:ChatCompletionRequest",
    "/responses": "openai.responses.protocol:ResponsesRequest",
    "/messages": "anthropic.protocol:AnthropicMessagesRequest",
}
NEEDED = {"model", "prompt", "messages", "input"}
#: What the gateway refuses; its own tests have them.
REFUSED = {*STEERING, "background", "previous_response_id"}

# The types of errors that are a client's.
CLIENTS = {"invalid_request_error", "not_found_error"}

pytestmark = [pytest.mark.vllm, pytest.mark.long]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", PROTOCOLS)
def test_the_generator_knows_every_parameter_that_vllm_has(path: str) -> None:
    module, name = PROTOCOLS[path].split(":")
    fields = getattr(importlib.import_module(f"vllm.entrypoints.{module}"), name).model_fields
    assert fields.keys() - ENDPOINTS[path][0].keys() - NEEDED - REFUSED == set()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Stack]:
    """The shipped CPU deployment with modes with two replicas and an adapter."""
    document = yaml.safe_load((ROOT / "deployments" / "smollm2-cpu-modes.yaml").read_text())
    (model,) = document["models"]
    model["modes"] = {"multi-replica": {"shape": "small", "replicas": 2}}
    model["control"] |= {"policy": "static", "slo": {}}
    model["adapters"]["sources"] = [{"name": "sql", "path": str(make(tmp_path / "sql", 1))}]
    document["gateway"]["queue_timeout_s"] = PATIENCE_S
    with running(document, "--no-ray") as stack:
        stack.steady(CHAT, 2)
        yield stack


@pytest.mark.process
@pytest.mark.timeout(1800, func_only=True)
def test_no_request_ends_an_engine(two: Stack) -> None:
    print(f"{SEED=}")  # noqa: T201 - pytest shows it if the test fails
    before = _engines(two)
    chance = random.Random(SEED)  # noqa: S311 - no secret
    requests = [draw(chance, [CHAT, CHAT, "sql"]) for _ in range(REQUESTS)]
    answers = asyncio.run(_answers(two, requests))
    assert [(problem, *request) for request, _, problem in answers if problem] == []
    assert _engines(two) == before
    # A generator whose requests are nearly all refused would prove nothing.
    statuses = Counter(status for _, status, _ in answers)
    assert statuses[200] >= REQUESTS / 3, statuses


def _engines(stack: Stack) -> set[tuple[str, int, int]]:
    return {(each.id, each.incarnation, each.pid) for each in stack.replicas(CHAT)}


async def _answers(stack: Stack, requests: list[Request]) -> list[tuple[Request, int, str]]:
    """Each request with the status of its answer and what is wrong with that; some are in flight at once."""
    left, found = iter(requests), []
    async with httpx.AsyncClient(timeout=PATIENCE_S, trust_env=False) as client:

        async def ask() -> None:
            for request in left:
                # httpx cannot encode what JSON can: half of a surrogate pair.
                body = json.dumps(request.body)
                answer = await client.post(f"{stack.base_url}{request.path}", content=body)
                found.append((request, answer.status_code, _problem(request, answer)))

        await asyncio.gather(*(ask() for _ in range(AT_ONCE)))
    return found


def _problem(request: Request, answer: httpx.Response) -> str:
    """What no client should receive: an error of the server, or an answer that is not the API's."""
    text, status = answer.text, answer.status_code
    if status == 200 and answer.headers["content-type"].startswith("text/event-stream"):
        events = [line[5:].strip() for line in text.splitlines() if line.startswith("data:")]
        errors = [json.loads(event).get("error") for event in events if event != "[DONE]"]
        good = events and all(_is_clients(error) for error in errors if error)
        return "" if good else f"in a stream: {text[-1000:]}"
    decoded = answer.json()
    error = decoded.get("error")
    if status == 200:
        return f"200 {text}" if error else ""
    enveloped = (request.path == "/messages") == (decoded.get("type") == "error")
    return "" if 400 <= status < 500 and enveloped and _is_clients(error) else f"{status} {text}"


def _is_clients(error: Any) -> bool:
    return isinstance(error, dict) and error.get("type") in CLIENTS and bool(error.get("message"))
