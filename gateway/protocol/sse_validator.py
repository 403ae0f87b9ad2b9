"""Follow a stream of server-sent events to its end: only whole, valid events reach the client.

Events pass as the bytes that came. Each payload is decoded into the few fields that end a stream or
count its tokens, which checks the whole of it and costs less than half a microsecond.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from gateway.protocol.errors import Refused, read_error, shown, shown_failure, status_of
from gateway.protocol.json_decoders import NULL, TypedEvent, any_json, chunk, typed
from gateway.protocol.paths import ApiDialect
from gateway.protocol.usage import TokenUsage, read_usage, usage_inside
from policy.errors import Refusal

# The worst JSON of this size is checked in 14 ms.
MAX_EVENT_BYTES: Final = 1024 * 1024
MAX_LINES: Final = 8192
# In one read, of 250 KB at most: no server has useful events of 60 bytes. The dearest take 2.5 us each.
MAX_EVENTS: Final = 4096
# A blank line after a line; lines end with LF, CRLF or CR. A CR after LF may be the first half of a CRLF.
_BOUNDARY: Final = re.compile(rb"\n(?:\n|\r\n|\r(?=[^\n]))|\r\r\n?")
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
_LF_BOUNDARY: Final = re.compile(rb"\n\n")  # of streams without a CR, in a fifth of the time
_DONE: Final = b"[DONE]"
_FAILED: Final = "response.failed"
# Looked for as numbers, which is a search for a byte and not for a string.
_NEWLINE: Final = ord("\n")
_RETURN: Final = ord("\r")


class SseValidator:
    """One stream; this base class knows no last event: any clean end is a good one.

    ``finished``: its last event has come. ``failed``: it contained an error, whose payload is ``error``.
    ``closed``: nothing more may follow. ``events``: those with a payload up to the one that finishes the
    answer. ``usage``: as the engine reported it last, with the event ``usage_at``; ``counted``: nothing that
    may come changes it.
    """

    def __init__(self, last_words: tuple[str, ...] = (), api: ApiDialect = ApiDialect.OPENAI) -> None:
        self._api = api
        self.finished = not last_words
        self._final_events = last_words
        self.failed = False
        self.closed = False
        self.error = b""
        self.events = 0
        self.usage: TokenUsage | None = None
        self.usage_at = 0
        self.counted = False
        self._held = bytearray()
        self._returns = False  # whether there was a CR

    def feed(self, data: bytes) -> bytes:
        """Take received bytes; returns the whole events that may go to the client now.

        An event is held until its blank line: an error event after half of one would be read as its
        continuation.
        """
        if self.closed:
            return b""
        if (
            not self._held
            and data[:6] == b"data: "
            and data[-2:] == b"\n\n"
            and data.find(_NEWLINE) == len(data) - 2
            and data.find(_RETURN) < 0
        ):
            return self._pass(data, data[6:-2])
        return self._feed_many(data)

    def rest(self) -> bytes:
        """The last event of a stream that has ended, where the second half of a CRLF was waited for."""
        return self.feed(b"\n") if self._held[-2:] == b"\n\r" else b""

    def end(self, *, clean: bool) -> Refused | None:
        """The upstream has ended: the error to send to the client, if any."""
        self._held.clear()
        if self.failed or (self.finished and (clean or self.closed)):
            self.counted = not self.failed
            return None
        self.failed = True
        return Refused(Refusal.STREAM_BROKEN, "The stream ended before the answer was complete.")

    def _feed_many(self, data: bytes) -> bytes:
        """Any number of events and parts of them."""
        held = self._held
        seen = max(0, len(held) - 3)  # a boundary may have begun in what is held
        held += data
        passed: list[bytes] = []
        begin = 0
        if not self._returns and data.find(_RETURN) >= 0:
            self._returns = True
        pattern = _BOUNDARY if self._returns else _LF_BOUNDARY
        for boundary in pattern.finditer(held, seen):
            event = bytes(held[begin : boundary.end()])
            passed.append(self._pass_block(event))
            begin = boundary.end()
            if self.closed:
                break
            if len(passed) == MAX_EVENTS:
                passed.append(self._broken("The replica sent too many events at once."))
                break
        del held[:begin]
        if self.closed:
            held.clear()
        elif len(held) > MAX_EVENT_BYTES:
            held.clear()
            passed.append(self._broken("The replica sent an event that is too large."))
        return b"".join(passed)

    def _pass_block(self, event: bytes) -> bytes:
        if len(event) > MAX_LINES and event.count(b"\n") + event.count(b"\r") > MAX_LINES:
            return self._broken("The replica sent an event of too many lines.")
        lines = [line[5:] for line in _LINE_END.split(event) if line.startswith(b"data:")]
        if lines:
            return self._pass(event, b"\n".join(lines).strip())
        return event if _is_text(event) else self._broken("The replica sent bytes that are no text.")

    def _pass(self, event: bytes, payload: bytes) -> bytes:
        """Take one event; returns the bytes that go to the client for it."""
        if payload == _DONE:
            self.closed = True
            if self.finished:
                self.counted = True
                return event
            return self._broken("The stream ended before the answer was complete.")
        if not event.isascii() and not _is_text(event):
            return self._broken("The replica sent bytes that are no text.")
        if not self.finished:
            self.events += 1
        try:
            return self._read(event, payload)
        except msgspec.ValidationError:
            # Not what we know, but it may be JSON all the same.
            try:
                any_json.decode(payload)
            except (ValueError, RecursionError):
                pass
            else:
                return event
        except (ValueError, RecursionError):
            pass
        return self._broken("The replica sent an event that is not valid JSON.")

    def _read(self, event: bytes, payload: bytes) -> bytes:
        """As :meth:`_pass`, of a payload that is text; raises ``ValueError`` if it is no JSON."""
        decoded = typed.decode(payload)
        if decoded.type == "error" or decoded.error != NULL:
            return self._fail(payload)
        self._count(decoded)
        if decoded.type in self._final_events:
            self.finished = True
            self.counted = not self.failed
        return event

    def _count(self, decoded: TypedEvent) -> None:
        if decoded.usage != NULL:
            self._use(read_usage(decoded.usage))

    def _use(self, usage: TokenUsage | None) -> None:
        """Take what an event reports, if it is understood."""
        if usage is not None:
            self.usage, self.usage_at = usage, self.events

    def _fail(self, payload: bytes) -> bytes:
        """The upstream's error event, in our envelope."""
        self.failed = self.closed = True
        self.error = payload
        return _relayed_error(payload).event(self._api)

    def _broken(self, why: str) -> bytes:
        self.failed = self.closed = True
        return Refused(Refusal.STREAM_BROKEN, why).event(self._api)


class ChatValidator(SseValidator):
    """Chat and completions: every choice needs a finish reason, then ``[DONE]``.

    With ``strip_usage`` the event that only counts tokens was not asked for by the client.
    """

    def __init__(self, choices: int, *, strip_usage: bool = False) -> None:
        super().__init__((_DONE.decode(),))
        self._choices = choices
        self._strip_usage = strip_usage
        self._finished: set[int] = set()

    def _read(self, event: bytes, payload: bytes) -> bytes:
        decoded = chunk.decode(payload)
        choices = decoded.choices
        if choices:
            for choice in choices:
                if choice.finish_reason is not None:
                    self._finished.add(choice.index)
                    self.finished = len(self._finished) >= self._choices
        elif decoded.error is not NULL and decoded.error != NULL:
            return self._fail(payload)
        if decoded.usage is not NULL and decoded.usage != NULL:
            self._use(read_usage(decoded.usage))
            if not choices:
                self.counted = self.finished
                if self._strip_usage:
                    return b""
        return event


class ResponsesValidator(SseValidator):
    """OpenAI's responses: one of three events is the final one."""

    def __init__(self) -> None:
        super().__init__(("response.completed", "response.incomplete", _FAILED), ApiDialect.RESPONSES)

    def _read(self, event: bytes, payload: bytes) -> bytes:
        event = super()._read(event, payload)
        if self.failed and self.finished and (told := shown_failure(payload)) is not payload:
            return b"event: %b\ndata: %b\n\n" % (_FAILED.encode(), told)
        return event

    def _count(self, decoded: TypedEvent) -> None:
        if decoded.type in self._final_events:
            self._use(usage_inside(decoded.response))
            self.failed = decoded.type == _FAILED


class MessagesValidator(SseValidator):
    """Anthropic's messages end with ``message_stop``; its first and last deltas count the tokens."""

    def __init__(self) -> None:
        super().__init__(("message_stop",), ApiDialect.MESSAGES)

    def _count(self, decoded: TypedEvent) -> None:
        found = (
            usage_inside(decoded.message) if decoded.type == "message_start" else read_usage(decoded.usage)
        )
        if found is not None:
            before = self.usage or TokenUsage()
            prompt, cached = found.prompt or before.prompt, found.cached or before.cached
            self._use(TokenUsage(prompt, cached, found.completion))


def _is_text(data: bytes) -> bool:
    try:
        str(data, "utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _relayed_error(payload: bytes) -> Refused:
    message, param, code = read_error(payload)
    # An engine may find only after some tokens that a request cannot be served.
    reason = Refusal.BAD_REQUEST if 400 <= status_of(payload) < 500 else Refusal.STREAM_BROKEN
    return Refused(reason, shown(message) or "The replica reported an error.", param=param, code=code)
