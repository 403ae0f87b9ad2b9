"""Follow a stream of server-sent events to its end without parsing what is in it.

Whole events pass as the bytes that came. A block of events is looked into only when it holds one
of the few byte strings that can end a stream; inside a JSON string their quotes would be escaped,
so text that a model writes never matches.
"""

from __future__ import annotations

import re
from typing import ClassVar

import msgspec

from gateway.errors import Refused, read_error
from policy.errors import Refusal

MAX_EVENT_BYTES = 8 * 1024 * 1024
_BOUNDARY = re.compile(rb"(?<=\n\n)|(?<=\n\r\n)")


class _Choice(msgspec.Struct):
    index: int = 0
    finish_reason: str | None = None


class _Payload(msgspec.Struct):
    type: str | None = None
    choices: list[_Choice] | None = None
    error: msgspec.Raw = msgspec.Raw(b"null")


_decoder = msgspec.json.Decoder(_Payload)


class Tail:
    """One stream. ``finished`` once it has said all it must, ``failed`` once it said an error.

    ``error`` is the payload of the upstream's error event, empty until there is one.
    This base class knows no last word: any clean end is a good one.
    """

    markers: ClassVar[tuple[bytes, ...]] = ()

    def __init__(self) -> None:
        self.finished = not self.markers
        self.failed = False
        self.closed = False
        self.error = b""
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Take what came; returns the whole events that may go to the client now.

        An event is held until its blank line came: a client can do nothing with a part of one, and
        an error event written after half an event would be read as its continuation.
        """
        if self.closed:
            return b""
        if self._held:
            data = self._held + data
            self._held = b""
        if not data.endswith((b"\n\n", b"\n\r\n")):
            cut = _last_boundary(data)
            self._held = data[cut:]
            data = data[:cut]
            if len(self._held) > MAX_EVENT_BYTES:
                self.failed = self.closed = True
                self._held = b""
                return data + self.error_event(
                    Refused(Refusal.STREAM_BROKEN, "The replica sent an event that is too large.")
                )
        for marker in self.markers:
            if marker in data:
                return self._look_into(data)
        return data

    def end(self, *, clean: bool) -> Refused | None:
        """The upstream has ended: what must still be said to the client, if anything."""
        self._held = b""
        if self.failed or (self.finished and (clean or self.closed)):
            return None
        self.failed = True
        return Refused(Refusal.STREAM_BROKEN, "The stream ended before the answer was complete.")

    def error_event(self, refused: Refused) -> bytes:
        """The event that tells a client of this API that the stream failed."""
        return b"data: " + refused.body() + b"\n\n"

    def _look_into(self, data: bytes) -> bytes:
        passed: list[bytes] = []
        for event in _BOUNDARY.split(data):
            payload = b"\n".join(line[5:].strip() for line in event.splitlines() if line.startswith(b"data:"))
            passed.append(self._pass(event, payload) if payload else event)
            if self.closed:
                break
        return b"".join(passed)

    def _pass(self, event: bytes, payload: bytes) -> bytes:
        """Note what ``event`` says; returns the bytes that go to the client for it."""
        try:
            said = _decoder.decode(payload)
        except (ValueError, RecursionError):  # also for bytes that are no UTF-8
            return event
        if self._terminal(said):
            self.finished = True
        elif said.type == "error" or bytes(said.error) != b"null":
            self.failed = self.closed = True
            self.error = payload
            return self.error_event(_relayed_error(payload))
        return event

    def _terminal(self, said: _Payload) -> bool:
        return False


class ChatTail(Tail):
    """Chat and completions: every choice needs a finish reason, then ``[DONE]``."""

    markers = (b'"finish_reason":"', b'"finish_reason": "', b"[DONE]", b'{"error"')

    def __init__(self, choices: int) -> None:
        super().__init__()
        self._choices = choices
        self._finished: set[int] = set()

    def _pass(self, event: bytes, payload: bytes) -> bytes:
        if payload != b"[DONE]":
            return super()._pass(event, payload)
        self.closed = True
        if self.finished:
            return event
        self.failed = True
        return self.error_event(
            Refused(Refusal.STREAM_BROKEN, "The stream ended before every choice was finished.")
        )

    def _terminal(self, said: _Payload) -> bool:
        for choice in said.choices or ():
            if choice.finish_reason is not None:
                self._finished.add(choice.index)
        return len(self._finished) >= self._choices


class ResponsesTail(Tail):
    """OpenAI's responses: one of three events is the last word."""

    markers = (
        b'"response.completed"',
        b'"response.incomplete"',
        b'"response.failed"',
        b'"error"',
        b"[DONE]",
    )

    def error_event(self, refused: Refused) -> bytes:
        said = {
            "type": "error",
            "code": refused.code,
            "message": refused.message,
            "param": refused.param,
            "error": {
                "message": refused.message,
                "type": refused.type,
                "param": refused.param,
                "code": refused.code,
            },
        }
        return b"event: error\ndata: " + msgspec.json.encode(said) + b"\n\n"

    def _terminal(self, said: _Payload) -> bool:
        self.failed = self.failed or said.type == "response.failed"
        return said.type in ("response.completed", "response.incomplete", "response.failed")


class MessagesTail(Tail):
    """Anthropic's messages end with ``message_stop``."""

    markers = (b'"message_stop"', b'"error"')

    def error_event(self, refused: Refused) -> bytes:
        return b"event: error\ndata: " + refused.body(anthropic=True) + b"\n\n"

    def _terminal(self, said: _Payload) -> bool:
        return said.type == "message_stop"


def _last_boundary(data: bytes) -> int:
    """The length of the whole events at the start of ``data``."""
    lf, crlf = data.rfind(b"\n\n"), data.rfind(b"\n\r\n")
    return max(lf + 2 if lf >= 0 else 0, crlf + 3 if crlf >= 0 else 0)


def _relayed_error(payload: bytes) -> Refused:
    message, param, code = read_error(payload)
    return Refused(Refusal.STREAM_BROKEN, message or "The replica reported an error.", param=param, code=code)
