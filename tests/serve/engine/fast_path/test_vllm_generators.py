"""vLLM's own generators, resumed by the fast path or read as vLLM reads them, over the same outputs."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import time
from collections.abc import AsyncGenerator, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from serve.engine.fast_path.event_templates import AnswerKind
from serve.engine.fast_path.output_iterator import EngineOutputs
from serve.engine.fast_path.stream import StreamedAnswer
from tests.serve.engine.fast_path.test_stream import TEXTS, Written

pytest.importorskip("vllm", reason="vLLM is not installed")

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
CREATED = re.compile(rb'"created":\d+')
ID = {"content": "chatcmpl-1", "text": "cmpl-1"}
Make = Callable[..., AsyncGenerator[str, None]]


class Parser:
    """As vLLM's parser of a chat without tools and reasoning."""

    def parse_delta(self, delta_text: str, **_: Any) -> Any:
        from vllm.entrypoints.generate.base.protocol import DeltaMessage  # noqa: PLC0415

        return DeltaMessage(content=delta_text) if delta_text else None


def parsed(outputs: Any, options: dict[str, Any], answer_id: str = "chatcmpl-1") -> AsyncGenerator[str, None]:
    return chat(outputs, options, answer_id, Parser)


def chat(
    outputs: Any, options: dict[str, Any], answer_id: str = "chatcmpl-1", parser: Any = None
) -> AsyncGenerator[str, None]:
    from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata  # noqa: PLC0415
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: PLC0415
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat  # noqa: PLC0415

    serving = OpenAIServingChat.__new__(OpenAIServingChat)
    vars(serving).update(
        parser_cls=parser, _make_parser=lambda *_: parser(), enable_force_include_usage=False,
        _include_reasoning_tokens_details=False, enable_log_deltas=False,
        response_role="assistant", enable_log_outputs=False, request_logger=None, system_fingerprint="f",
        enable_prompt_tokens_details=True, enable_per_request_metrics=False,
    )  # fmt: skip
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "hi"}], stream=True, **options)
    metadata = RequestResponseMetadata(request_id=answer_id)
    made: AsyncGenerator[str, None] = serving.chat_completion_stream_generator(
        request, outputs, answer_id, 'a"model', [], object(), metadata
    )
    return made


def completion(outputs: Any, options: dict[str, Any], answer_id: str = "cmpl-1") -> AsyncGenerator[str, None]:
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
        request, ["hi"], merge_async_iterators(outputs), answer_id, 1, 'a"model', 1, None,
        RequestResponseMetadata(request_id=answer_id),
    )  # fmt: skip
    return made


def outputs_of(seed: int, texts: list[str] | None = None, created: int | None = None) -> list[Any]:
    """Outputs of a request with random texts and tokens, which ends, fails or breaks off.

    With ``texts`` it has these, and ends. ``created`` is its count of tokens that the prefix cache stored.
    """
    from vllm.outputs import CompletionOutput, RequestOutput  # noqa: PLC0415
    from vllm.v1.engine.exceptions import EngineDeadError  # noqa: PLC0415

    chance = random.Random(seed)  # noqa: S311 - the same each time
    count = len(texts) if texts else chance.randint(1, 7)
    given: list[Any] = []
    for at in range(count):
        ends = at == count - 1
        reason = chance.choice(["stop", "length"] if texts else ["stop", "length", "error", "abort"])
        choice = CompletionOutput(
            index=0, text=texts[at] if texts else chance.choice(TEXTS), token_ids=[5] * chance.randint(1, 3),
            cumulative_logprob=None, logprobs=None, finish_reason=reason if ends else None,
            stop_reason=chance.choice([None, 7, '"'] if ends else [None]),
        )  # fmt: skip
        given.append(
            RequestOutput(
                request_id="r", prompt="hi", prompt_token_ids=[1, 2], prompt_logprobs=None,
                outputs=[choice], finished=ends, num_cached_tokens=1, num_cache_creation_tokens=created,
            )
        )  # fmt: skip
    if seed % 4 == 0:
        given[-1] = EngineDeadError() if seed % 8 else ValueError("bad")
    return given


async def events_of(outputs: list[Any], make: Callable[[Any], AsyncGenerator[str, None]]) -> bytes:
    """The events of vLLM's generator, read as vLLM reads them."""

    async def read() -> AsyncGenerator[Any, None]:
        for each in outputs:
            if isinstance(each, Exception):
                raise each
            yield each

    return "".join([event async for event in make(read())]).encode()


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize(("make", "field"), [(chat, "content"), (completion, "text")])
async def test_both_make_the_same_events(make: Make, field: str, seed: int) -> None:
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if seed % 3 else {}

    vllm = await events_of(outputs_of(seed), lambda outputs: make(outputs, options))
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


def learn(
    make: Make, field: str, options: dict[str, Any], last: str = "two", created: int | None = None
) -> AnswerKind:
    """The kind of two answers that vLLM has written."""
    kind = AnswerKind()
    # A token may be a part of a character.
    for texts in (["", "one", "two", last], ["a", last]):
        assert kind.templates is None
        record(kind, lambda outputs: make(outputs, options), field, texts, created, skip_empty=make is parsed)
    assert kind.templates is not None
    return kind


def record(
    kind: AnswerKind,
    make: Callable[[Any], AsyncGenerator[str, None]],
    field: str,
    texts: list[str],
    created: int | None = None,
    *,
    skip_empty: bool = False,
) -> None:
    """Have vLLM's generator write an answer with these texts."""
    outputs = EngineOutputs()
    answer = StreamedAnswer(
        make(outputs), outputs, Written(), field=field, skip_empty=skip_empty, failure=lambda _: None,
        done=lambda: None, kind=kind, answer_id=ID[field],
    )  # fmt: skip
    for each in outputs_of(1, texts, created):
        answer.put(each)


@pytest.mark.parametrize("created", [None, 7])
@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize(("make", "field"), [(chat, "content"), (parsed, "content"), (completion, "text")])
async def test_the_events_of_a_kind_are_those_of_the_generator(
    make: Make, field: str, seed: int, created: int | None
) -> None:
    from vllm.v1.engine import FinishReason  # noqa: PLC0415

    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if seed % 3 else {}
    last = "" if make is parsed and seed % 2 else "two"
    kind = learn(make, field, options, last, None if created is None else 3)
    other = f'x"\\{seed}'
    vllm = await events_of(outputs_of(seed, created=created), lambda outputs: make(outputs, options, other))
    written, outputs = Written(), EngineOutputs()
    answer = StreamedAnswer(
        make(outputs, options, other), outputs, written, field=field, skip_empty=make is parsed,
        failure=lambda output: output if isinstance(output, Exception) else None, done=lambda: None,
        kind=kind, answer_id=other,
    )  # fmt: skip
    texts = [output.outputs[0].text for output in outputs_of(seed) if not isinstance(output, Exception)]
    made: list[Any] = []
    state = SimpleNamespace(
        stream_interval=1, queue=None, prompt_token_ids=[1, 2], num_cached_tokens=1, stats=None,
        num_cache_creation_tokens=created,
        make_request_output=lambda *_, **__: made[-1],
        detokenizer=SimpleNamespace(get_next_output_text=lambda *_: texts.pop(0), stop=["end"]),
    )  # fmt: skip
    answer.follow(state)
    objects = 0
    for given in outputs_of(seed, created=created):
        made.append(given)
        output = given
        if not isinstance(given, Exception):
            (choice,) = given.outputs
            reason = choice.finish_reason and FinishReason[choice.finish_reason.upper()]
            output = state.make_request_output(choice.token_ids, None, reason, choice.stop_reason)
        if output is not None:
            objects += 1
            answer.put(output)
    assert written.ended
    assert CREATED.sub(b"", written.body) == CREATED.sub(b"", vllm)
    assert objects == (b'"error"' in vllm)


@pytest.mark.parametrize(
    "change",
    [
        {"num_cached_tokens": None}, {"num_cache_creation_tokens": 3}, {"stream_interval": 2},
        {"came_before": True},
    ],
)  # fmt: skip
async def test_vllm_writes_what_the_templates_do_not_have(change: dict[str, Any]) -> None:
    options = {"stream_options": {"include_usage": True}}
    outputs, written = EngineOutputs(), Written()
    answer = StreamedAnswer(
        chat(outputs, options), outputs, written, field="content", skip_empty=False, failure=lambda _: None,
        done=lambda: None, kind=learn(chat, "content", options), answer_id="chatcmpl-1",
    )  # fmt: skip
    fields = {"stream_interval": 1, "num_cached_tokens": 1, "num_cache_creation_tokens": None} | change
    state = SimpleNamespace(
        queue=None, prompt_token_ids=[1, 2], stats=None, make_request_output=lambda *_, **__: "vLLM's",
        detokenizer=SimpleNamespace(get_next_output_text=lambda *_: "a", stop=[]),
        **fields,
    )  # fmt: skip
    if "came_before" in change:
        answer.put(outputs_of(1, ["", "a"])[0])
    answer.follow(state)
    assert state.make_request_output([5], None, None, None) == "vLLM's"
    assert written.body.count(b'"role"') == ("came_before" in change)


@pytest.mark.parametrize("counts", ["none", "summary", "detailed"])
def test_answers_with_counts_of_speculative_decoding_have_no_kind(counts: str) -> None:
    """vLLM brings them with the last output alone: whether an answer has some is known too late."""
    from serve.engine.fast_path.app import FastPath, Submission  # noqa: PLC0415

    config = SimpleNamespace(observability_config=SimpleNamespace(per_request_spec_decode_metrics=counts))
    llm = SimpleNamespace(vllm_config=config, output_processor=SimpleNamespace(process_outputs=None))
    path = FastPath(llm, SimpleNamespace(state=SimpleNamespace()), None)
    route: Any = SimpleNamespace(field="text")
    request = SimpleNamespace(model="m", stream_options=None)
    submission = Submission({"type": "token"}, None, "cmpl-1-0", {}, EngineOutputs())
    assert (path._kind(route, request, submission) is None) == (counts != "none")


@pytest.mark.parametrize("interval", [1, 2])
async def test_an_answer_is_created_when_it_is_submitted(
    monkeypatch: pytest.MonkeyPatch, interval: int
) -> None:
    """As in vLLM, whoever writes the events; the first output may come much later."""
    from serve.engine.fast_path.app import FastPath, Submission  # noqa: PLC0415

    clock = itertools.count(1_000_000, 1000)
    now = next(clock)
    monkeypatch.setattr(time, "time", lambda: now)
    config = SimpleNamespace(observability_config=SimpleNamespace(per_request_spec_decode_metrics="none"))
    states: dict[str, Any] = {}

    async def add_request(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(request_id="r", output=None)

    llm = SimpleNamespace(
        vllm_config=config, refusal=lambda *_: None, add_request=add_request,
        output_processor=SimpleNamespace(process_outputs=None, request_states=states),
    )  # fmt: skip
    path = FastPath(llm, SimpleNamespace(state=SimpleNamespace()), None)
    route: Any = SimpleNamespace(field="content", skip_empty=False, suffix="")
    request = SimpleNamespace(model="m", stream_options=None)
    by_vllm = []
    for _ in range(4):
        outputs, written, made = EngineOutputs(), Written(), list[Any]()
        texts = ["one", "two"]
        states["r"] = state = SimpleNamespace(
            stream_interval=1 if len(by_vllm) < 3 else interval, prompt_token_ids=[1, 2], num_cached_tokens=1,
            num_cache_creation_tokens=None, stats=None, make_request_output=lambda *_, made=made: made[-1],
            detokenizer=SimpleNamespace(get_next_output_text=lambda *_, rest=texts: rest.pop(0), stop=["e"]),
        )  # fmt: skip
        submission = Submission({"type": "token"}, None, "chatcmpl-1", {}, outputs)
        serving = asyncio.create_task(path._stream(route, request, submission, chat(outputs, {}), written))
        await asyncio.sleep(0)
        submitted, now = now, next(clock)
        for each in outputs_of(1, ["one", "two"]):
            made.append(each)
            (choice,) = each.outputs
            if state.make_request_output(choice.token_ids, None, choice.finish_reason) is not None:
                state.queue.put(each)
        del states["r"]
        await serving
        assert set(CREATED.findall(written.body)) == {b'"created":%d' % submitted}
        by_vllm.append(bool(outputs.finished))
    assert by_vllm == [True, True, False, interval > 1]


async def test_only_events_of_the_known_form_are_templates() -> None:
    def named(outputs: Any) -> AsyncGenerator[str, None]:
        return chat(outputs, {"stream_options": {"include_usage": True}})

    async def changed(outputs: Any, *, at: int, old: str, new: str) -> AsyncGenerator[str, None]:
        number = 0
        async for event in named(outputs):
            yield event.replace(old, new) if number == at else event
            number += 1

    cases = [
        (0, '"id":', '"_id":'), (0, '"created":', '"at":'), (1, '"one"', '["one"]'), (2, '"two"', '"too"'),
        (2, '"finish_reason":', '"reason":'), (3, '"cached_tokens":1', '"cached_tokens":1,"media":2'),
        (3, '"total_tokens":', '"tokens":'), (4, "[DONE]", "[END]"), (0, "", ""),
    ]  # fmt: skip
    for at, old, new in cases:
        kind = AnswerKind()
        for _ in range(2):
            record(kind, partial(changed, at=at, old=old, new=new), "content", ["one", "two"])
        assert (kind.templates is None) == bool(old), old


async def test_what_differs_between_two_answers_is_in_no_template() -> None:
    async def timed(outputs: Any) -> AsyncGenerator[str, None]:
        spent = times.pop(0)
        async for event in chat(outputs, {"stream_options": {"include_usage": True}}):
            yield event.replace('"usage":', f'"metrics":{spent},"usage":')

    times, kind = [1, 2, 3, 3], AnswerKind()
    for known in (False, False, False, True):
        record(kind, timed, "content", ["one", "two"])
        assert (kind.templates is not None) == known


@pytest.mark.parametrize("texts", [["one"], ["", "one"], ["", ""]])
async def test_an_answer_without_an_event_of_text_alone_is_no_template(texts: list[str]) -> None:
    kind = AnswerKind()
    for _ in range(2):
        record(kind, lambda outputs: completion(outputs, {}), "text", texts)
    assert kind.templates is None
