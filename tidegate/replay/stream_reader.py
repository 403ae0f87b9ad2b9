"""Timings of an answer of OpenAI's API: its first event, its last token, its gaps and its usage."""

from __future__ import annotations

from typing import Any

import msgspec


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Said(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Said)
_MAX_SHOWN = 200
_MAX_READ = 16 * 1024


class StreamTimings:
    """One answer as it is read; instants are seconds of one clock, ``None`` for what has not come.

    ``events`` are server-sent events, of which ``chunks`` have a choice: ``first_at`` is the instant of the
    first chunk, ``first_event_at`` that of the first event. ``gaps`` are the seconds between reads that
    brought events, as the gateway counts them: events of one read share its instant. ``input_tokens`` and
    ``output_tokens`` are 0 until the endpoint has counted them. ``error`` is what went wrong, empty so far.
    """

    def __init__(self) -> None:
        self.sent_at: float | None = None
        self.first_event_at: float | None = None
        self.first_at: float | None = None
        self.finished_at: float | None = None
        self.ended_at = 0.0
        self.events = self.chunks = 0
        self.gaps: list[float] = []
        self.input_tokens = self.output_tokens = self.cached_tokens = 0
        self.error = ""
        self._last_at = 0.0
        self._rest = self._start = b""

    def sent(self, at: float) -> None:
        """The request was written at ``at``."""
        self.sent_at = at

    def feed(self, data: bytes, at: float) -> None:
        """Take what one read brought at ``at``."""
        self.ended_at = at
        if not self.events and len(self._start) < _MAX_READ:
            self._start += data
        before = self.events
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self.events += 1
                payload = line[5:].strip()
                if payload != b"[DONE]":
                    self.take(payload, at)
        if self.events == before:
            return
        if self.first_event_at is None:
            self.first_event_at = at
        else:
            self.gaps.append(at - self._last_at)
        self._last_at = at

    def end(self, status: int) -> None:
        """The answer is over: note what is missing."""
        if self.error:
            return
        if status != 200:
            try:  # an error is one object, and no event
                answer = _decoder.decode(self._start).error
            except msgspec.MsgspecError:
                answer = None
            shown = self._start[:_MAX_SHOWN].decode(errors="replace").strip()
            self.error = _message(answer) or shown or f"status {status}"
        elif self.finished_at is None:
            self.error = "the answer ended without a finish_reason"

    def itl_s(self) -> float | None:
        """Seconds per token after the first; without usage, chunks stand for tokens."""
        tokens = self.output_tokens or self.chunks
        if self.first_at is None or self.finished_at is None or tokens < 2:
            return None
        return (self.finished_at - self.first_at) / (tokens - 1)

    def take(self, payload: bytes, at: float) -> None:
        """Read one object of OpenAI's API: a chunk, a whole answer or an error envelope."""
        try:
            answer = _decoder.decode(payload)
        except msgspec.MsgspecError as error:
            self.error = self.error or f"not an answer of this API: {error}"
            return
        if answer.error is not None:
            self.error = self.error or _message(answer.error)
        for choice in answer.choices:
            self.chunks += 1
            if self.first_at is None:
                self.first_at = at
            if choice.finish_reason is not None and self.finished_at is None:
                self.finished_at = at
        if (usage := answer.usage) is not None:
            self.input_tokens, self.output_tokens = usage.prompt_tokens, usage.completion_tokens
            if (details := usage.prompt_tokens_details) is not None:
                self.cached_tokens = details.cached_tokens or 0


def _message(error: Any) -> str:
    """What an error says; the empty text for none."""
    if error is None:
        return ""
    return str(error.get("message") or error if isinstance(error, dict) else error)[:_MAX_SHOWN]
