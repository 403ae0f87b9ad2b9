"""A stream that a generator like vLLM's begins and ends, and the events between that follow its template."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pydantic_core
import pytest

from serve.engine.fast_path.output_iterator import EngineOutputs
from serve.engine.fast_path.stream import StreamedAnswer, StreamedAnswers

TEXTS = ["The", " tide\n", "", '"quoted"', ' {"content":"x"} ', "漢\x7f\u2028", "end"]


class Written:
    """A response writer that keeps what it gets."""

    def __init__(self) -> None:
        self.status = 0
        self.body = b""
        self.writes = 0
        self.ended = self.fails = False

    def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        assert not self.status
        assert dict(headers)[b"content-type"].startswith(b"text/event-stream")
        self.status = status

    def write(self, data: bytes) -> None:
        if self.fails:
            raise OSError("full")
        self.body += data
        self.writes += 1

    def end(self, data: bytes = b"") -> None:
        self.body += data
        self.ended = True

    def on_abort(self, callback: Callable[[], None]) -> None:
        raise AssertionError("the app listens")


def event(**fields: Any) -> str:
    chunk = {"id": 'c"1', "choices": [{"delta": fields, "finish_reason": None}], "object": "chunk"}
    return f"data: {pydantic_core.to_json(chunk).decode()}\n\n"


async def served(outputs: Any, *, skip_empty: bool, resumed: list[str]) -> AsyncGenerator[str, None]:
    """The shape of vLLM's generators: a first event, one an output, counts at the end, errors as events."""
    tokens = 0
    try:
        first = True
        async for output in outputs:
            if first:
                yield event(role="assistant", content="")
                first = False
            (choice,) = output.outputs
            tokens += len(choice.token_ids)
            resumed.append(choice.text)
            if choice.text or not skip_empty or output.finished:
                yield event(content=choice.text)
        yield event(usage=tokens)
    except ValueError as error:
        yield event(error=str(error))
    yield "data: [DONE]\n\n"


def output(text: str, finished: bool = False, tokens: int = 1) -> Any:
    choice = SimpleNamespace(text=text, token_ids=[7] * tokens)
    return SimpleNamespace(outputs=[choice], finished=finished)


class Stream:
    def __init__(self, *, skip_empty: bool = False) -> None:
        self.resumed: list[str] = []
        self.written = Written()
        self.done = 0
        outputs = EngineOutputs()
        self.answer = StreamedAnswer(
            served(outputs, skip_empty=skip_empty, resumed=self.resumed), outputs, self.written,
            field="content", skip_empty=skip_empty, failure=self._failure, done=self._end,
        )  # fmt: skip

    @staticmethod
    def _failure(output: Any) -> Exception | None:
        if isinstance(output, Exception):
            return output
        return ValueError("it allows no token") if output.outputs[0].text == "refused" else None

    def _end(self) -> None:
        self.done += 1


async def expected(outputs: list[Any], *, skip_empty: bool = False) -> bytes:
    async def given() -> AsyncGenerator[Any, None]:
        for each in outputs:
            if isinstance(each, Exception):
                raise each
            yield each

    return "".join([each async for each in served(given(), skip_empty=skip_empty, resumed=[])]).encode()


@pytest.mark.parametrize("skip_empty", [False, True])
async def test_the_events_are_those_of_the_generator(skip_empty: bool) -> None:
    outputs = [output(text, finished=text == "end") for text in TEXTS]
    stream = Stream(skip_empty=skip_empty)
    for each in outputs:
        stream.answer.put(each)
    wanted = await expected([output(text, text == "end") for text in TEXTS], skip_empty=skip_empty)
    assert stream.written.body == wanted
    assert (stream.written.status, stream.written.ended, stream.done) == (200, True, 1)
    assert stream.resumed == ["The", "end"]


async def test_an_answer_without_text_has_no_template() -> None:
    texts = ["", "", "a", "b", ""]
    stream = Stream(skip_empty=True)
    for at, text in enumerate(texts):
        stream.answer.put(output(text, at == 4, tokens=2))
    assert stream.written.body == await expected(
        [output(t, at == 4, 2) for at, t in enumerate(texts)], skip_empty=True
    )
    assert stream.resumed == ["", "", "a", ""]


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize("last", [ValueError("it died"), output("refused", finished=True)])
async def test_an_error_is_an_event(before: int, last: Any, begun: bool) -> None:
    """Also where the generator began with the submission, which writes nothing."""
    stream = Stream()
    if begun:
        stream.answer.begin()
        assert not stream.written.status
    outputs = [*map(output, TEXTS[:before])]
    for each in [*outputs, last, output("late", finished=True)]:
        stream.answer.put(each)
    assert stream.written.body == await expected([*outputs, Stream._failure(last)])
    assert (stream.written.ended, stream.done) == (True, 1)


async def test_outputs_are_taken_where_vllm_makes_them() -> None:
    """An output without an end needs no object; with an interval vLLM decides."""
    made: list[Any] = []

    def state(interval: int) -> Any:
        texts = iter(TEXTS[1:])
        detokenizer = SimpleNamespace(get_next_output_text=lambda *_: next(texts))
        return SimpleNamespace(
            stream_interval=interval, queue=None, detokenizer=detokenizer,
            make_request_output=lambda *given, **_: made.append(given) or "made",
        )  # fmt: skip

    stream, plain, merged = Stream(), state(1), state(2)
    stream.answer.follow(plain)
    assert plain.queue is stream.answer
    assert plain.make_request_output([1], None, None, None) == "made"
    stream.answer.put(output("The"))
    for _ in TEXTS[1:-1]:
        assert plain.make_request_output([7], None, None, None, error=None) is None
    assert plain.make_request_output([7], None, "stop", None) == "made"
    stream.answer.put(output("end", finished=True))
    assert stream.written.body == await expected([output(text, text == "end") for text in TEXTS])
    assert [given[0] for given in made] == [[1], [7]]
    # As `OutputProcessor.abort_requests` calls it.
    assert (
        plain.make_request_output(
            new_token_ids=[],
            pooling_output=None,
            finish_reason="abort",
            stop_reason=None,
            kv_transfer_params=None,
        )
        == "made"
    )
    stream = Stream()
    stream.answer.follow(merged)
    stream.answer.put(output("The"))
    assert merged.make_request_output([7], None, None, None) == "made"


async def test_a_client_that_left_ends_the_generator() -> None:
    for begun in (False, True):
        stream = Stream()
        if begun:
            stream.answer.begin()
        stream.answer.close()
        stream.answer.begin()
        assert (stream.written.ended, stream.done) == (False, 0)
    stream = Stream()
    stream.answer.put(output("The"))
    body = stream.written.body
    stream.answer.close()
    stream.answer.close()
    stream.answer.put(output("end", finished=True))
    assert (stream.written.body, stream.written.ended, stream.done) == (body, False, 0)
    await asyncio.sleep(0)
    assert stream.resumed == ["The"]


async def test_a_generator_that_cannot_begin_cuts_its_stream_alone() -> None:
    async def fails() -> AsyncGenerator[str, None]:
        raise LookupError
        yield ""

    done: list[int] = []
    answer = StreamedAnswer(
        fails(), EngineOutputs(), Written(), field="content", skip_empty=False, failure=lambda _: None,
        done=lambda: done.append(1),
    )  # fmt: skip
    answer.begin()
    answer.put(output("late", finished=True))
    assert done == [1]


async def test_a_failure_to_write_cuts_this_stream_alone() -> None:
    """Raised to vLLM's handler of outputs, it would end all requests."""
    for given in (output(" tide"), output("end", finished=True)):
        stream = Stream()
        stream.answer.put(output("The"))
        stream.written.fails = True
        stream.written.end = stream.written.write  # type: ignore[method-assign]
        stream.answer.put(given)
        assert stream.done == 1


def test_texts_are_escaped_as_by_pydantic() -> None:
    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    text = "".join(characters)
    assert msgspec.json.encode(text) == pydantic_core.to_json(text)


class Outputs:
    """A stream with a template and its request's state in vLLM; each token is the text of its number."""

    def __init__(self, detokenizer: Any = None) -> None:
        self.answers = StreamedAnswers(plain("", []))
        self.stream = Stream()
        self.tokens: list[int] = []
        self.stats = SimpleNamespace(num_generation_tokens=1, last_token_ts=10.0)
        decoding = SimpleNamespace(stop=[], decode_next=self._decode, token_ids=self.tokens)
        decoding.get_next_output_text = lambda *_: "unused"
        self.state = SimpleNamespace(
            stream_interval=1, queue=None, detokenizer=detokenizer or decoding, stats=self.stats,
            make_request_output=lambda *_, **__: "made",
        )  # fmt: skip
        self.step = SimpleNamespace(num_generation_tokens=5, inter_token_latencies_iter=[0.5])

    @staticmethod
    def _decode(token_id: int) -> str:
        if token_id < 0:
            raise OverflowError(token_id)
        return f" {token_id}" if token_id else ""

    def begin(self) -> None:
        if self.stream.answer.follow(self.state):
            self.answers.add("one", self.stream.answer)
        assert self.take(plain("two", [1])) == [plain("two", [1])]
        self.stream.answer.put(output("The"))

    def take(self, *outputs: Any, at: float = 10.5, version: str | None = None) -> list[Any]:
        return self.answers.take(list(outputs), at, self.step, version)


def plain(request_id: str, token_ids: list[int], **more: Any) -> Any:
    return SimpleNamespace(request_id=request_id, new_token_ids=token_ids, logprobs=None, **more)


async def test_outputs_that_bring_tokens_alone_are_not_for_vllm() -> None:
    given = Outputs()
    given.begin()
    others = [plain("two", [3]), plain("three", [4])]
    assert not given.answers.takes_all([plain("one", [1, 2]), *others], None)
    assert given.take(plain("one", [1, 2]), *others) == others
    assert given.answers.takes_all([plain("one", [0])], None)
    assert given.take(plain("one", [0]), at=11.5) == []
    written = await expected([output("The"), output(" 1 2"), output(""), output("", finished=True)])
    assert written.startswith(given.stream.written.body)
    # What vLLM would have counted of them.
    assert given.tokens == [1, 2, 0]
    assert (given.stats.num_generation_tokens, given.stats.last_token_ts) == (4, 11.5)
    assert (given.step.num_generation_tokens, given.step.inter_token_latencies_iter) == (8, [0.5, 0.5, 1.0])
    # vLLM's generator counts them when it ends the answer.
    given.stream.answer.put(output("end", finished=True))
    assert b'"usage":5' in given.stream.written.body
    given.answers.remove("one")
    assert given.take(plain("one", [6])) == [plain("one", [6])]


async def test_all_other_outputs_are_vllms() -> None:
    given = Outputs()
    given.begin()
    ending = plain("one", [1])
    ending.logprobs = []
    assert not given.answers.takes_all([plain("one", [1]), ending], None)
    assert given.take(ending) == [ending]
    # NumPy cannot tell whether an array is equal to nothing.
    ending.logprobs = np.zeros(2)
    assert given.take(ending)[0] is ending
    # A step with other weights: vLLM notes in each request where they begin.
    assert not given.answers.takes_all([plain("one", [1])], "b")
    assert given.take(plain("one", [1]), version="b") == [plain("one", [1])]
    assert given.take(plain("one", [1]), version="b") == []
    assert given.tokens == [1]
    early = Outputs()
    assert early.stream.answer.follow(early.state)
    early.answers.add("one", early.stream.answer)
    assert not early.answers.takes_all([plain("one", [1])], None)
    assert early.take(plain("one", [1])) == [plain("one", [1])]
    for detokenizer in (
        SimpleNamespace(stop=["."], decode_next=str, token_ids=[], get_next_output_text=None),
        SimpleNamespace(get_next_output_text=None),
    ):
        assert not Outputs(detokenizer).stream.answer.follow(Outputs(detokenizer).state)


async def test_a_token_that_cannot_be_decoded_cuts_its_stream_alone() -> None:
    given = Outputs()
    given.begin()
    body = given.stream.written.body
    assert given.take(plain("one", [-1]), plain("two", [1])) == [plain("two", [1])]
    assert (given.stream.done, given.stream.written.body) == (1, body)
    assert given.take(plain("one", [1])) == [plain("one", [1])]


async def test_steps_without_counts_are_taken() -> None:
    given = Outputs()
    given.stats = given.state.stats = None  # type: ignore[assignment] # as vLLM has it without its log of them
    given.begin()
    assert given.answers.take([plain("one", [1])], 10.0, None, None) == []
    assert given.tokens == [1]
