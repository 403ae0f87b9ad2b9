"""A streamed answer: vLLM's generator writes the events that are not known yet, this module the others.

vLLM makes each event of a stream by validating and dumping an object, in a task of the request that waits for
the engine's output. Here the engine's output handler itself writes the event. The generator that vLLM's
serving code made for the request waits meanwhile, and is resumed, in the same call, with the outputs that
begin, end or fail the answer. The first event with text is the template of those that follow. The events of
whole answers are the templates of the answers of their kind; for those the generator is not begun.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final

import msgspec

from serve.engine.fast_path.event_templates import AnswerEventTemplates, AnswerKind, RecordedAnswer, usage_of
from serve.engine.fast_path.output_iterator import EngineOutputs
from serve.engine.interface import ResponseWriter

HEADERS: Final = [(b"content-type", b"text/event-stream; charset=utf-8")]

_encode: Final = msgspec.json.Encoder().encode

log = logging.getLogger("tidegate.engine")


class StreamedAnswer:
    """Writes the events of one request; it stands in the place of the request's output queue in vLLM.

    ``events`` is vLLM's generator, which reads ``outputs``. ``field`` is the name of the field that holds the
    text of an event. With ``skip_empty`` an event without text is left out. ``failure`` returns what vLLM's
    ``generate`` raises at an error of the engine or at a last output, if anything. ``done`` is called after
    the last event, or when writing failed. Once the templates of the ``kind`` are known, vLLM's generator
    writes only the errors of the answer, whose events have the id ``answer_id`` and the time ``created``.
    """

    def __init__(
        self,
        events: AsyncGenerator[str, None],
        outputs: EngineOutputs,
        writer: ResponseWriter,
        *,
        field: str,
        skip_empty: bool,
        failure: Callable[[Any], Exception | None],
        done: Callable[[], None],
        kind: AnswerKind | None = None,
        answer_id: str = "",
        created: int = 0,
    ) -> None:
        self._events = events
        self._outputs = outputs
        self._writer = writer
        self._key = b'"%b":' % field.encode()
        self._skip_empty = skip_empty
        self._failure = failure
        self._done = done
        self._kind = kind
        self._templates = None if kind is None else kind.templates
        self._id = _encode(answer_id)
        self._created = created
        # Without vLLM's generator.
        self._own: AnswerEventTemplates | None = None
        self._recorded: RecordedAnswer | None = None
        if kind is not None and self._templates is None:
            self._recorded = RecordedAnswer(self._id, self._key, skip_empty)
        # The call of vLLM's generator that waits for an output.
        self._waiting: Any = None
        self._begun = self._ended = False
        # The bytes before and after the text of an event, once they are known.
        self._before = self._after = b""
        # Tokens of the events that vLLM's generator did not see; it counts them.
        self._unseen: list[int] = []
        # Of vLLM's state of the request: its detokenizer's function and tokens, and its counts.
        self._decode: Callable[[int], str] = str
        self._token_ids: list[int] = []
        self._stats: Any = None

    @property
    def has_template(self) -> bool:
        """Whether :meth:`take` takes tokens."""
        return bool(self._before) and not self._ended

    def begin(self) -> None:
        """Begin vLLM's generator, unless the templates do without it: that of a chat notes the time."""
        if self._templates is None and not self._ended:
            try:
                self._resume(None, finished=False)
            except Exception:  # noqa: BLE001 - see `_cut`
                self._cut()

    def follow(self, state: Any) -> bool:
        """Take the outputs of the request with this ``RequestState`` of vLLM's output processor.

        Returns whether :meth:`take` may have those that bring tokens alone.
        """
        state.queue = self
        if state.stream_interval > 1:
            self._templates = None
            self.begin()
            return False
        make, next_text = state.make_request_output, state.detokenizer.get_next_output_text
        unseen, write = self._unseen, self._write

        def made(
            new_token_ids: list[int],
            pooling_output: Any,
            finish_reason: Any,
            stop_reason: Any = None,
            *rest: Any,
            **more: Any,
        ) -> Any:
            """As ``RequestState.make_request_output``; what is written here needs no object."""
            known = self._templates is not None and (finish_reason is not None or self._own is None)
            if known and self._write_own(state, new_token_ids, finish_reason, stop_reason):
                return None
            if finish_reason is not None or not self._before:
                return make(new_token_ids, pooling_output, finish_reason, stop_reason, *rest, **more)
            unseen.extend(new_token_ids)
            write(next_text(False, True))
            return None

        state.make_request_output = made
        detokenizer = state.detokenizer
        # An engine may have no tokenizer, and with stop strings vLLM searches the text.
        decode = getattr(detokenizer, "decode_next", None)
        if decode is None or detokenizer.stop:
            return False
        self._decode, self._token_ids, self._stats = decode, detokenizer.token_ids, state.stats
        return True

    def take(self, token_ids: list[int], at: float, latencies: list[float]) -> bool:
        """The tokens of a step that ended at ``at``, if the answer has a template; otherwise false.

        As vLLM does, it decodes them, and adds to its counts and to the step's ``latencies``.
        """
        if not self.has_template:
            return False
        if (stats := self._stats) is not None:
            stats.num_generation_tokens += len(token_ids)
            latencies.append(at - stats.last_token_ts)
            stats.last_token_ts = at
        try:
            text = ""
            for token_id in token_ids:
                self._token_ids.append(token_id)
                self._unseen.append(token_id)
                text += self._decode(token_id)
        except Exception:  # noqa: BLE001 - see `_cut`
            self._cut()
        else:
            self._write(text)
        return True

    def put(self, output: Any) -> None:
        """The next output of the engine, or the error that ends the request."""
        if self._ended:
            return
        try:
            ends = isinstance(output, Exception) or output.finished
            if ends and (error := self._failure(output)) is not None:
                self._resume(error, finished=True)
            else:
                self._take(output)
        except Exception:  # noqa: BLE001 - see `_cut`
            self._cut()

    def close(self) -> None:
        """End without another event: the client has left, or all is written."""
        self._ended = True
        if self._waiting is not None:
            with contextlib.suppress(GeneratorExit):
                self._waiting.throw(GeneratorExit)
            self._waiting = None

    def _write_own(self, state: Any, token_ids: list[int], reason: Any, stop: Any) -> bool:
        """Write a first or last output by the templates; false, having done nothing, if vLLM has to."""
        templates = self._templates
        if templates is None or (reason is not None and str(reason) == "error"):
            return False
        if self._own is None and not (token_ids and templates.fits(state)):
            self._templates = None
            return False
        if self._ended:
            return True
        try:
            self._unseen.extend(token_ids)
            text = state.detokenizer.get_next_output_text(reason is not None, True)
            events, own = b"", self._own
            if own is None:
                self._own = own = AnswerEventTemplates(templates, self._id, b"%d" % self._created)
                self._before, self._after, events = own.before, own.after, own.first
                self._begun = True
                self._writer.start(200, list(HEADERS))
            if reason is None:
                if events := events + self._event(text):
                    self._writer.write(events)
            else:
                self._ended = True
                usage = usage_of(state, len(self._unseen))
                self._writer.end(events + own.end(text, str(reason), stop, usage))
                self._done()
        except Exception:  # noqa: BLE001 - see `_cut`
            self._cut()
        return True

    def _take(self, output: Any) -> None:
        (choice,) = output.outputs
        if self._before and not output.finished:
            self._unseen.extend(choice.token_ids)
            self._write(choice.text)
            return
        if self._unseen:
            choice.token_ids = [*self._unseen, *choice.token_ids]
            self._unseen.clear()
        if self._own is None:
            # vLLM's generator has begun.
            self._templates = None
        events = self._resume(output, finished=output.finished)
        # The event that names the role has an empty text.
        if choice.text and not output.finished:
            self._learn(events[-1] if events else b"", choice.text)
        if self._recorded is not None:
            self._record(self._recorded, output, events)

    def _record(self, recorded: RecordedAnswer, output: Any, events: list[bytes]) -> None:
        """Keep what vLLM made of ``output``, until all is known of the kind."""
        if not recorded.add(output, events):
            self._recorded = None
        elif output.finished and self._kind is not None:
            self._kind.record(recorded.templates(output, events))

    def _write(self, text: str) -> None:
        try:
            if event := self._event(text):
                self._writer.write(event)
        except Exception:  # noqa: BLE001 - see `_cut`
            self._cut()

    def _event(self, text: str) -> bytes:
        """The event of a ``text`` that is neither the first nor the last, if it has one."""
        return self._before + _encode(text) + self._after if text or not self._skip_empty else b""

    def _cut(self) -> None:
        """End after a fault of this module; raised, it would end the handler of outputs, and all requests."""
        log.exception("a stream is cut")
        self._ended = True
        self._done()

    def _resume(self, output: Any, *, finished: bool) -> list[bytes]:
        """Give ``output`` to vLLM's generator and write the events that it makes of it; returns them."""
        self._outputs.next, self._outputs.finished = output, finished
        made: list[bytes] = []
        while not self._ended:
            waiting = self._waiting or self._events.__anext__()
            self._waiting = None
            try:
                waiting.send(None)
            except StopIteration as event:
                made.append(event.value.encode())
            except StopAsyncIteration:
                self._ended = True
            else:
                self._waiting = waiting
                break
        if self._own is not None and self._own.first and not isinstance(output, Exception):
            # vLLM's generator begins here, with an event that has been written.
            made = made[1:]
        if made and not self._begun:
            self._begun = True
            self._writer.start(200, list(HEADERS))
        if self._ended:
            self._writer.end(b"".join(made))
            self._done()
        elif made:
            self._writer.write(b"".join(made))
        return made

    def _learn(self, event: bytes, text: str) -> None:
        """Take ``event``, which vLLM made of ``text``, as the template of the next ones."""
        # Quotes within strings are escaped, so the key is found nowhere else.
        before, key, after = event.partition(self._key + _encode(text))
        if key:
            self._before, self._after = before + self._key, after


class StreamedAnswers:
    """The streams of an engine, by vLLM's ids of requests. ``plain`` is an output that brings no token."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain
        self._answers: dict[str, StreamedAnswer] = {}
        self._weight_version: Any = None

    def add(self, request_id: str, answer: StreamedAnswer) -> None:
        """Its outputs are taken until :meth:`remove`."""
        self._answers[request_id] = answer

    def remove(self, request_id: str) -> None:
        self._answers.pop(request_id, None)

    def takes_all(self, outputs: list[Any], weight_version: Any) -> bool:
        """Whether :meth:`take` leaves nothing of these ``outputs``."""
        if weight_version != self._weight_version:
            return False
        for output in outputs:
            answer = self._answers.get(output.request_id)
            if answer is None or not (answer.has_template and self._is_plain(output)):
                return False
        return True

    def take(self, outputs: list[Any], at: float, stats: Any, weight_version: Any) -> list[Any]:
        """Write the events of outputs that bring tokens and nothing else; returns those left for vLLM.

        ``outputs`` are those of one step, which ended at ``at``; ``stats`` are vLLM's of it.
        """
        if weight_version != self._weight_version:
            # vLLM notes in each request from which of its tokens on.
            self._weight_version = weight_version
            return outputs
        answers, left = self._answers, list[Any]()
        latencies: list[float] = [] if stats is None else stats.inter_token_latencies_iter
        tokens = 0
        for output in outputs:
            answer = answers.get(output.request_id)
            if answer is not None and self._is_plain(output):
                token_ids = output.new_token_ids
                if answer.take(token_ids, at, latencies):
                    tokens += len(token_ids)
                    continue
            left.append(output)
        if tokens and stats is not None:
            stats.num_generation_tokens += tokens
        return left

    def _is_plain(self, output: Any) -> bool:
        """Whether ``output`` brings tokens and nothing else."""
        plain = self._plain
        plain.request_id, plain.new_token_ids = output.request_id, output.new_token_ids
        try:
            return bool(output == plain)
        except ValueError:  # it has an array, as of routed experts
            return False
