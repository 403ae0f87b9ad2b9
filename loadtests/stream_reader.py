"""What the answers of chat and completions say, and when: streams read by read, or whole."""

from __future__ import annotations

from typing import Any

import msgspec


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Said(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Said)


class Reading:
    """What an answer has said so far. ``error`` is empty as long as none was read."""

    def __init__(self) -> None:
        self.finish_reason: str | None = None
        self.prompt_tokens = 0
        self.tokens = 0
        self.error = ""

    def take(self, payload: bytes) -> None:
        """Read one JSON object of OpenAI's API: a chunk, a whole answer or an error envelope."""
        try:
            said = _decoder.decode(payload)
        except msgspec.DecodeError as error:
            self.error = self.error or f"not an answer of this API: {error}"
            return
        if said.error is not None:
            message = said.error.get("message") if isinstance(said.error, dict) else said.error
            self.error = self.error or str(message)
        for choice in said.choices:
            self.finish_reason = choice.finish_reason or self.finish_reason
        if said.usage is not None:
            self.prompt_tokens = said.usage.prompt_tokens
            self.tokens = said.usage.completion_tokens


class Stream(Reading):
    """A stream of server-sent events. Moments are seconds of one clock, taken at the socket.

    ``first_at`` and ``finished_at`` are the reads that brought the first event and the finish
    reason. ``gaps`` are the seconds between reads that brought events, as the gateway counts them:
    events that came in one read share its moment.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first_at: float | None = None
        self.finished_at: float | None = None
        self.events = 0
        self.gaps: list[float] = []
        self._last_at = 0.0
        self._rest = b""

    def feed(self, data: bytes, at: float) -> None:
        """Take what one read brought."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        before = self.events
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), at)
        if self.events == before:
            return
        if self.first_at is None:
            self.first_at = at
        else:
            self.gaps.append(at - self._last_at)
        self._last_at = at

    def mean_itl_s(self) -> float:
        """Seconds per token after the first, up to the finish reason; 0 for a single token.

        Without usage in the stream, its events stand for tokens.
        """
        tokens = self.tokens or self.events
        if self.first_at is None or self.finished_at is None or tokens < 2:
            return 0.0
        return (self.finished_at - self.first_at) / (tokens - 1)

    def _event(self, payload: bytes, at: float) -> None:
        self.events += 1
        if payload == b"[DONE]":
            return
        self.take(payload)
        if self.finish_reason is not None and self.finished_at is None:
            self.finished_at = at
