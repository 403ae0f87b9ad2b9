"""A streamed answer: vLLM's generator writes its first and last events, this module those between.

vLLM makes each event of a stream by validating and dumping an object, in a task of the request that waits for
the engine's output. Here the engine's output handler itself writes the event. The generator that vLLM's
serving code made for the request waits meanwhile, and is resumed, in the same call, with the outputs that
begin, end or fail the answer. The first event with text is the template of those that follow.
"""

from __future__ import annotations

import types
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any

import msgspec
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from serve.engine.interface import ResponseWriter

HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8")]

_encode = msgspec.json.Encoder().encode


class EngineOutputs:
    """The outputs of one request, as vLLM's serving code reads them: an async iterator without a task.

    A reader that waits is suspended until whoever drives it has given it an output and resumes it.
    """

    def __init__(self) -> None:
        self.next: Any = None
        self.finished = False

    def __aiter__(self) -> EngineOutputs:
        return self

    @types.coroutine
    def __anext__(self) -> Generator[None, None, Any]:
        while self.next is None:
            if self.finished:
                raise StopAsyncIteration
            yield
        output, self.next = self.next, None
        if isinstance(output, BaseException):
            raise output
        return output

    async def aclose(self) -> None:
        """What the reader of an iterator that failed calls."""


class StreamedAnswer:
    """Writes the events of one request; it stands in the place of the request's output queue in vLLM.

    ``events`` is vLLM's generator, which reads ``outputs``. ``field`` is the name of the field that holds the
    text of an event. With ``skip_empty`` an event without text is left out. ``done`` is called once, after
    the last event.
    """

    def __init__(
        self,
        events: AsyncGenerator[str, None],
        outputs: EngineOutputs,
        writer: ResponseWriter,
        *,
        field: str,
        skip_empty: bool,
        done: Callable[[], None],
    ) -> None:
        self._events = events
        self._outputs = outputs
        self._writer = writer
        self._key = b'"%b":' % field.encode()
        self._skip_empty = skip_empty
        self._done = done
        self._step: Any = None
        self._begun = self._ended = False
        # The bytes before and after the text of an event, once they are known.
        self._before = self._after = b""
        # Tokens of the events that vLLM's generator did not see; it counts them.
        self._unseen: list[int] = []

    def put(self, output: Any) -> None:
        """The next output of the engine, or the error that ends the request."""
        if self._ended:
            return
        if isinstance(output, Exception):
            self._resume(_raised(output), finished=True)
            return
        (choice,) = output.outputs
        if not self._before or output.finished:
            if self._unseen:
                choice.token_ids = [*self._unseen, *choice.token_ids]
                self._unseen = []
            events = self._resume(output, finished=output.finished)
            if choice.text and not output.finished:
                self._learn(events, choice.text)
            return
        self._unseen += choice.token_ids
        if choice.text or not self._skip_empty:
            self._writer.write(self._before + _encode(choice.text) + self._after)

    def close(self) -> None:
        """End without another event: the client has left."""
        self._ended = True
        if self._step is not None:
            try:
                self._step.throw(GeneratorExit)
            except GeneratorExit:
                self._step = None

    def _resume(self, output: Any, *, finished: bool) -> bytes:
        """Give ``output`` to vLLM's generator and write the events that it makes of it; returns the last."""
        self._outputs.next, self._outputs.finished = output, finished
        made: list[bytes] = []
        while True:
            if self._step is None:
                self._step = self._events.__anext__()
            try:
                self._step.send(None)
            except StopIteration as event:
                made.append(event.value.encode())
                self._step = None
            except StopAsyncIteration:
                self._step = None
                self._ended = True
                break
            else:
                # It waits for the next output.
                break
        if made and not self._begun:
            self._begun = True
            self._writer.start(200, list(HEADERS))
        if self._ended:
            self._writer.end(b"".join(made))
            self._done()
        elif made:
            self._writer.write(b"".join(made))
        return made[-1] if made else b""

    def _learn(self, event: bytes, text: str) -> None:
        """Take ``event``, which vLLM made of ``text``, as the template of the next ones."""
        found = self._key + _encode(text)
        # Quotes within strings are escaped, so a key is found nowhere else.
        before, key, after = event.partition(found)
        if key:
            self._before, self._after = before + self._key, after


def _raised(error: Exception) -> Any:
    """What vLLM's ``generate`` raises for an ``error`` of the engine."""
    if isinstance(error, (EngineDeadError, VLLMClientError, GracefulHTTPError)):
        return error
    failed = EngineGenerateError()
    failed.__cause__ = error
    return failed
