"""One real vLLM on one real Ray, started once: from ``tidegate up`` to ``tidegate down`` in a few minutes.

The tests run in the order of this file. The only two starts after that of `up` run side by side.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import psutil
import pytest
import yaml

from tests.e2e.adapters import make, run_adapters
from tests.e2e.conftest import CHAT
from tests.e2e.first_question import ask
from tests.e2e.stack import ROOT, Stack, eventually, running
from tests.e2e.traffic import PATIENCE_S, Traffic
from tests.serve.engine.fast_path.corpus import differences, part, send

pytestmark = [pytest.mark.smoke, pytest.mark.timeout(600, func_only=True)]

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
ASK: dict[str, Any] = {"model": CHAT, "messages": QUESTION, "temperature": 0, "max_tokens": 16}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": CITY}}


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """The shipped CPU deployment with modes with one replica on one core, whose count the tests set."""
    document = yaml.safe_load((ROOT / "deployments" / "smollm2-cpu-modes.yaml").read_text())
    (model,) = document["models"]
    model["modes"] = {"multi-replica": model["modes"]["multi-replica"]}
    model["control"] |= {"policy": "static", "slo": {}}
    document["gateway"] |= {"queue_timeout_s": PATIENCE_S, "workers": 1}
    with running(document) as stack:
        yield stack


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=stack.base_url, api_key="unused", max_retries=0, timeout=300) as client:
        yield client


def test_the_request_that_up_prints_is_answered(stack: Stack, tmp_path: Path) -> None:
    assert "Paris" in ask(stack.output, tmp_path)


def test_a_killed_engine_recovers_while_a_second_replica_starts(stack: Stack) -> None:
    """Each start has a core of its own; what is asked meanwhile waits in the gateway."""
    (before,) = stack.replicas(CHAT)
    family = [psutil.Process(before.pid), *psutil.Process(before.pid).children(recursive=True)]
    done = stack.run("scale", CHAT, "2")
    assert done.returncode == 0, done.stderr
    assert (stack.model(CHAT).target, stack.model(CHAT).decided_by) == (2, "by hand")
    next((p for p in family if "VLLM::EngineCore" in " ".join(p.cmdline())), family[0]).kill()
    eventually(lambda: not any(replica.state == "ready" for replica in stack.replicas(CHAT)), 10)
    with Traffic(stack, CHAT, clients=2, max_tokens=8) as traffic:
        stack.steady(CHAT, 2)
        after = {replica.id: replica.incarnation for replica in stack.replicas(CHAT)}
        eventually(lambda: traffic.replicas == after.keys(), 120, lambda: f"served: {traffic.replicas}")
    assert not traffic.problems
    assert after[before.id] == before.incarnation + 1
    assert not any(process.is_running() for process in family)


def test_the_openai_client_streams_the_text_of_the_whole_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**ASK).choices[0]
    assert "Paris" in (whole.message.content or "")
    parts = [part.choices[0] for part in client.chat.completions.create(**ASK, stream=True)]
    assert "".join(part.delta.content or "" for part in parts) == whole.message.content
    assert [part.finish_reason for part in parts if part.finish_reason] == ["stop"]


def test_a_replica_answers_with_and_without_its_fast_path_alike(stack: Stack) -> None:
    replica = stack.replicas(CHAT)[0]

    async def compare() -> list[str]:
        headers = {"x-tidegate-secret": stack.state.secret()}
        async with httpx.AsyncClient(
            base_url=replica.url, headers=headers, timeout=300, trust_env=False
        ) as http:
            return await differences(part(CHAT), partial(send, http))

    assert asyncio.run(compare()) == []


def test_the_anthropic_client_gets_a_message(stack: Stack) -> None:
    url = stack.base_url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0, timeout=300) as claude:
        with claude.messages.stream(model=CHAT, messages=QUESTION, max_tokens=16) as stream:
            assert "".join(stream.text_stream)
            assert stream.get_final_message().usage.output_tokens > 0
        with pytest.raises(anthropic.NotFoundError):
            claude.messages.create(model="nobody", messages=QUESTION, max_tokens=1)


def test_a_tool_is_called_with_arguments_of_its_schema(client: openai.OpenAI) -> None:
    ask: Any = ASK | {"max_tokens": 80, "tools": [TOOL], "tool_choice": "required"}
    (call,) = client.chat.completions.create(**ask).choices[0].message.tool_calls or ()
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")


@pytest.mark.parametrize(
    ("change", "kind", "param", "code"),
    [
        ({"model": "nobody"}, openai.NotFoundError, "model", "model_not_found"),
        ({"temperature": 9}, openai.BadRequestError, "temperature", None),
        (
            {"messages": [{"role": "user", "content": "cat " * 3000}]},
            openai.BadRequestError,
            "messages",
            "context_length_exceeded",
        ),
    ],
    ids=["model", "parameter", "too long"],
)
def test_an_invalid_request_has_its_error_class_parameter_and_code(
    client: openai.OpenAI, change: dict[str, Any], kind: type[openai.APIStatusError], param: str, code: str
) -> None:
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**ASK | change)
    assert (caught.value.param, caught.value.code) == (param, code)


def test_an_adapter_is_added_used_and_removed(stack: Stack, client: openai.OpenAI, tmp_path: Path) -> None:
    alias = run_adapters(stack, "add", "sql", str(make(tmp_path / "sql", 1)))
    answer = client.chat.completions.create(**ASK | {"model": "sql"})
    assert answer.model == f"sql@{alias['versions'][0]['digest'][:12]}"
    assert (
        answer.choices[0].message.content != client.chat.completions.create(**ASK).choices[0].message.content
    )
    run_adapters(stack, "remove", "sql")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**ASK | {"model": "sql"})


def test_status_and_explain_show_the_mode_and_the_replicas(stack: Stack) -> None:
    (model,) = stack.status()["models"]
    assert (model["name"], model["ready"], model["mode"]) == (CHAT, 2, "multi-replica")
    explained = stack.run("explain", CHAT)
    assert explained.returncode == 0, explained.stderr
    assert "multi-replica" in explained.stdout


def test_a_replica_requires_the_secret_and_exposes_only_listed_routes(stack: Stack) -> None:
    replica, _ = stack.replicas(CHAT)
    for path in ("/v1/models", "/metrics", "/health", "/internal/load", "/nowhere"):
        assert stack.ask_replica(replica, path, secret=False).status_code == 401
    for path in ("/health", "/load", "/version", "/v1/load_lora_adapter", "/docs", "/openapi.json", "/ping"):
        assert stack.ask_replica(replica, path).status_code == 404
    assert stack.ask_replica(replica, "/v1/models").status_code == 200
    assert "vllm:num_requests_running" in stack.ask_replica(replica, "/metrics").text


def test_down_leaves_no_process_and_no_port(stack: Stack) -> None:
    stack.down()
