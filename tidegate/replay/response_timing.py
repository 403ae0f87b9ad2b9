"""Timings and usage of an answer of the OpenAI API, streamed or not."""

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


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Answer)
_MAX_SHOWN = 200
_MAX_READ = 16 * 1024


class StreamTimings:
    """One answer as it is read; instants are seconds of one clock, ``None`` until then.

    ``events`` counts server-sent events, ``chunks`` those with a choice; ``first_event_at`` and ``first_at``
    are the instants of the first of each. ``gaps`` are the seconds between reads with events, as in the
    gateway. Token counts are 0 until the endpoint reports them. ``error`` is empty without an error.
    """

    def __init__(self, sent_at: float = 0.0) -> None:
        self.sent_at = sent_at
        self.first_event_at: float | None = None
        self.first_at: float | None = None
        self.finished_at: float | None = None
        self.ended_at = 0.0
        self.events = self.chunks = 0
        self.gaps: list[float] = []
        self.input_tokens = self.output_tokens = self.cached_tokens = 0
        self.error = ""
        self._last_at = 0.0
        self._finished_events = 0
        self._rest = self._start = b""

    def sent(self, at: float) -> None:
        self.sent_at = at

    def feed(self, data: bytes, at: float) -> None:
        """Add the bytes of a read at ``at``."""
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
        """The answer has ended with ``status``; sets ``error`` if it is incomplete."""
        if self.error:
            return
        if status != 200:
            try:  # an error is one JSON object
                answer = _decoder.decode(self._start).error
            except msgspec.MsgspecError:
                answer = None
            shown = self._start[:_MAX_SHOWN].decode(errors="replace").strip()
            self.error = _message(answer) or shown or f"status {status}"
        elif self.finished_at is None:
            self.error = "the answer ended without a finish_reason"

    def itl_s(self) -> float | None:
        """Seconds per token after the first; without usage, per chunk."""
        tokens = self.output_tokens or self.chunks
        if self.first_at is None or self.finished_at is None or tokens < 2:
            return None
        return (self.finished_at - self.first_at) / (tokens - 1)

    def gap_s(self) -> float:
        """The mean gap between events up to the one that finishes the answer, as the gateway measures it."""
        if self.first_event_at is None or self.finished_at is None or self._finished_events < 2:
            return 0.0
        return (self.finished_at - self.first_event_at) / (self._finished_events - 1)

    def take(self, payload: bytes, at: float) -> None:
        """Read one object of the API: a chunk, a whole answer or an error."""
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
                self._finished_events = self.events
        if (usage := answer.usage) is not None:
            self.input_tokens, self.output_tokens = usage.prompt_tokens, usage.completion_tokens
            if (details := usage.prompt_tokens_details) is not None:
                self.cached_tokens = details.cached_tokens or 0


def _message(error: Any) -> str:
    """The message of an error; empty without one."""
    if error is None:
        return ""
    return str(error.get("message") or error if isinstance(error, dict) else error)[:_MAX_SHOWN]
