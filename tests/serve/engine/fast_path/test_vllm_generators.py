"""vLLM's own generators, resumed by the fast path or read as vLLM reads them, over the same outputs."""

from __future__ import annotations

import random
import re
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from serve.engine.fast_path.engine_outputs import EngineOutputs
from serve.engine.fast_path.stream import StreamedAnswer
from tests.serve.engine.fast_path.test_stream import TEXTS, Written

pytest.importorskip("vllm", reason="vLLM is not installed")

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
CREATED = re.compile(rb'"created":\d+')
Make = Callable[[Any, dict[str, Any]], AsyncGenerator[str, None]]


def chat(outputs: Any, options: dict[str, Any]) -> AsyncGenerator[str, None]:
    from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata  # noqa: PLC0415
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: PLC0415
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat  # noqa: PLC0415

    serving = OpenAIServingChat.__new__(OpenAIServingChat)
    vars(serving).update(
        parser_cls=None, enable_force_include_usage=False, _include_reasoning_tokens_details=False,
        response_role="assistant", enable_log_outputs=False, request_logger=None, system_fingerprint="f",
        enable_prompt_tokens_details=True, enable_per_request_metrics=False,
    )  # fmt: skip
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "hi"}], stream=True, **options)
    metadata = RequestResponseMetadata(request_id="chatcmpl-1")
    made: AsyncGenerator[str, None] = serving.chat_completion_stream_generator(
        request, outputs, "chatcmpl-1", 'a"model', [], None, metadata
    )
    return made


def completion(outputs: Any, options: dict[str, Any]) -> AsyncGenerator[str, None]:
    from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata  # noqa: PLC0415
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest  # noqa: PLC0415
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion  # noqa: PLC0415
    from vllm.utils.async_utils import merge_async_iterators  # noqa: PLC0415

    serving = OpenAIServingCompletion.__new__(OpenAIServingCompletion)
    vars(serving).update(
        enable_force_include_usage=False, system_fingerprint="f",
        enable_prompt_tokens_details=True, enable_per_request_metrics=False,
    )  # fmt: skip
    request = CompletionRequest(prompt="hi", stream=True, **options)
    made: AsyncGenerator[str, None] = serving.completion_stream_generator(
        request, ["hi"], merge_async_iterators(outputs), "cmpl-1", 1, 'a"model', 1, None,
        RequestResponseMetadata(request_id="cmpl-1"),
    )  # fmt: skip
    return made


def outputs_of(seed: int) -> list[Any]:
    """Outputs of a request with random texts and tokens, which ends, fails or breaks off."""
    from vllm.outputs import CompletionOutput, RequestOutput  # noqa: PLC0415
    from vllm.v1.engine.exceptions import EngineDeadError  # noqa: PLC0415

    chance = random.Random(seed)  # noqa: S311 - the same each time
    count = chance.randint(1, 7)
    given: list[Any] = []
    for at in range(count):
        ends = at == count - 1
        reason = chance.choice(["stop", "length", "error", "abort"])
        choice = CompletionOutput(
            index=0, text=chance.choice(TEXTS), token_ids=[5] * chance.randint(1, 3), cumulative_logprob=None,
            logprobs=None, finish_reason=reason if ends else None,
            stop_reason=chance.choice([None, 7, '"'] if ends else [None]),
        )  # fmt: skip
        given.append(
            RequestOutput(
                request_id="r", prompt="hi", prompt_token_ids=[1, 2], prompt_logprobs=None,
                outputs=[choice], finished=ends, num_cached_tokens=1,
            )
        )  # fmt: skip
    if seed % 4 == 0:
        given[-1] = EngineDeadError() if seed % 8 else ValueError("bad")
    return given


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize(("make", "field"), [(chat, "content"), (completion, "text")])
async def test_both_make_the_same_events(make: Make, field: str, seed: int) -> None:
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if seed % 3 else {}

    async def read() -> AsyncGenerator[Any, None]:
        for each in outputs_of(seed):
            if isinstance(each, Exception):
                raise each
            yield each

    vllm = "".join([event async for event in make(read(), options)]).encode()
    written, outputs = Written(), EngineOutputs()
    answer = StreamedAnswer(
        make(outputs, options), outputs, written, field=field, skip_empty=False,
        failure=lambda output: output if isinstance(output, Exception) else None, done=lambda: None,
    )  # fmt: skip
    for each in outputs_of(seed):
        answer.put(each)
    assert written.ended
    assert CREATED.sub(b"", written.body) == CREATED.sub(b"", vllm)
    if seed % 4 == 0:
        assert b'"error"' in vllm
