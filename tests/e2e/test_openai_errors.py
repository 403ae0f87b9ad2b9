"""What users of the official OpenAI client catch: a class, a code and a parameter for each mistake."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.conftest import CHAT, POOLING
from tests.e2e.stack import Stack

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.timeout(600, func_only=True)]

ASK: dict[str, Any] = {"model": CHAT, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
TOO_LONG = "cat " * 3000
BAD_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nonsense"}}}
# An absolute path that is none of ours to serve.
FILE_PATH = re.compile(r"(?<![\w/])/(?!v1/)[\w.-]+/[\w.-]+")


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=stack.base_url, api_key="unused", max_retries=0, timeout=300) as client:
        yield client


def envelope(answer: httpx.Response) -> dict[str, Any]:
    """The error that an answer carries, once its form holds and it says nothing of files or code."""
    said = answer.json()
    assert list(said) == ["error"]
    error: dict[str, Any] = said["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert isinstance(error["param"], str | None)
    assert isinstance(error["code"], str | None)
    assert not FILE_PATH.search(answer.text), answer.text
    assert "Traceback" not in answer.text
    assert ".py" not in answer.text
    assert answer.headers["x-request-id"]
    return error


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"messages": [{"role": "user", "content": TOO_LONG}]}, "messages", "context_length_exceeded"),
        ({"messages": "hi"}, "messages", None),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", None),
        ({"messages": []}, None, None),
        ({"temperature": 9}, "temperature", None),
        ({"temperature": "hot"}, "temperature", None),
        ({"top_p": 3}, "top_p", None),
        ({"max_tokens": 100_000}, "max_tokens", None),
        ({"max_tokens": -1}, "max_tokens", None),
        ({"max_tokens": "many"}, "max_tokens", None),
        ({"max_completion_tokens": 100_000}, "max_completion_tokens", None),
        ({"n": "two"}, "n", None),
        ({"n": 99}, "n", None),
        ({"stop": list("abcde")}, "stop", None),
        ({"logit_bias": {"99999999": 1}}, "logit_bias", None),
        ({"logprobs": True, "top_logprobs": 99}, "logprobs", None),
        ({"prompt_logprobs": 2}, "prompt_logprobs", "unsupported"),
        ({"response_format": BAD_SCHEMA}, None, None),
        ({"response_format": {"type": "odd"}}, "response_format.type", None),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", None),
        ({"chat_template": "x"}, "chat_template", "unsupported"),
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_bad_chat_is_a_bad_request(
    client: openai.OpenAI, change: dict[str, Any], param: str | None, code: str | None, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            **{**ASK, "stream": stream},
            extra_body=change,
            extra_headers={"x-request-id": "bad-chat"},
        )
    assert (caught.value.param, caught.value.code) == (param, code)
    assert caught.value.request_id == "bad-chat"
    envelope(caught.value.response)


def test_a_prompt_that_is_too_long_says_so_everywhere(client: openai.OpenAI) -> None:
    calls = {
        "prompt": lambda: client.completions.create(model=CHAT, prompt=TOO_LONG, max_tokens=1),
        "input": lambda: client.responses.create(model=CHAT, input=TOO_LONG),
    }
    pooled = lambda: client.embeddings.create(model=POOLING, input=TOO_LONG)  # noqa: E731
    for param, call in [*calls.items(), ("input", pooled)]:
        with pytest.raises(openai.BadRequestError) as caught:
            call()
        assert (caught.value.param, caught.value.code) == (param, "context_length_exceeded")
        envelope(caught.value.response)


def test_a_model_that_is_not_there_is_not_found(client: openai.OpenAI) -> None:
    for call in (
        lambda: client.chat.completions.create(**ASK | {"model": "nobody"}),
        lambda: client.models.retrieve("nobody"),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            call()
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        assert "nobody" in envelope(caught.value.response)["message"]


def test_a_model_is_asked_only_for_what_its_runner_does(client: openai.OpenAI) -> None:
    for call, model, runner in (
        (lambda: client.embeddings.create(model=CHAT, input="x"), CHAT, "generate"),
        (lambda: client.chat.completions.create(**ASK | {"model": POOLING}), POOLING, "pooling"),
        (lambda: client.completions.create(model=POOLING, prompt="x"), POOLING, "pooling"),
        (lambda: client.responses.create(model=POOLING, input="x"), POOLING, "pooling"),
        (lambda: client.post("/score", body={"model": CHAT}, cast_to=object), CHAT, "generate"),
        (lambda: client.post("/rerank", body={"model": CHAT}, cast_to=object), CHAT, "generate"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            call()
        message = envelope(caught.value.response)["message"]
        assert f"{model} has runner '{runner}'" in message
        assert (caught.value.param, caught.value.code) == ("model", "unsupported")


@pytest.mark.parametrize("change", [{"previous_response_id": "resp_1"}, {"background": True}])
def test_responses_keep_no_state(client: openai.OpenAI, change: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=CHAT, input="x", **change)
    assert (caught.value.param, caught.value.code) == (next(iter(change)), "unsupported")
    envelope(caught.value.response)


@pytest.mark.parametrize("body", [b"{nope", b"", b"[1]", b'{"model": "smollm2", "messages": "\xff"}'])
def test_what_is_no_json_object_is_a_bad_request(stack: Stack, body: bytes) -> None:
    answer = stack.http.post(
        f"{stack.base_url}/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400
    assert envelope(answer)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/nowhere", 404),
        ("GET", "/files", 404),
        ("POST", "/load_lora_adapter", 404),
        ("POST", "/messages/count_tokens", 404),
        ("GET", "/responses/resp_1", 404),
        ("GET", "/chat/completions", 405),
        ("POST", "/models", 405),
    ],
)
def test_a_path_that_is_not_served_has_the_envelope(
    stack: Stack, method: str, path: str, status: int
) -> None:
    answer = stack.http.request(method, stack.base_url + path, json=ASK, headers={"x-request-id": "lost-1"})
    assert answer.status_code == status
    assert answer.headers["x-request-id"] == "lost-1"
    assert envelope(answer)["code"] == ("not_found" if status == 404 else "method_not_allowed")
