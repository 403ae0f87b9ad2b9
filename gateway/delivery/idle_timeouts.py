"""Idle timeouts of replicas: one periodic sweep over all attempts of a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Protocol

SWEEP_EVERY_S = 0.1


class Limits(Protocol):
    """The keys of the document's ``gateway`` section that bound silence, in seconds."""

    @property
    def first_token_timeout_s(self) -> float: ...
    @property
    def inter_token_timeout_s(self) -> float: ...
    @property
    def answer_timeout_s(self) -> float: ...


class WatchedAttempt(Protocol):
    """An attempt under a timeout. ``streams``: a stream was requested; ``begun``: its first event came.

    ``stirred`` is whether a byte came since the last call, or none could because the client is slow;
    ``quiet_since`` belongs to the sweep. Instants are seconds of ``time.monotonic``.
    """

    streams: bool
    begun: bool
    sent_at: float
    quiet_since: float

    def stirred(self) -> bool:
        """Whether any byte came since the last call."""

    def expire(self, waited_s: float) -> None:
        """The replica was silent for too long."""


class IdleTimeouts:
    """The attempts of this worker, with the longest silence of each.

    A stream may be silent for ``first_token_timeout_s`` before its first event and ``inter_token_timeout_s``
    after it; any other answer must be whole within ``answer_timeout_s``.
    """

    def __init__(self, limits: Callable[[], Limits]) -> None:
        self._limits = limits
        self._attempts: set[WatchedAttempt] = set()

    def watch(self, attempt: WatchedAttempt) -> None:
        self._attempts.add(attempt)

    def unwatch(self, attempt: WatchedAttempt) -> None:
        self._attempts.discard(attempt)

    async def run(self) -> None:
        while True:
            limits = self._limits()
            shortest = min(
                limits.first_token_timeout_s, limits.inter_token_timeout_s, limits.answer_timeout_s
            )
            await asyncio.sleep(min(SWEEP_EVERY_S, shortest / 4))
            self.sweep(monotonic())

    def sweep(self, now: float) -> None:
        """End the attempts that were silent for too long."""
        limits = self._limits()
        first_s, next_s = limits.first_token_timeout_s, limits.inter_token_timeout_s
        answer_s = limits.answer_timeout_s
        for attempt in list(self._attempts):
            if not attempt.streams:
                if now - attempt.sent_at > answer_s:
                    attempt.expire(answer_s)
            elif attempt.stirred():
                attempt.quiet_since = now
            elif now - attempt.quiet_since > (limit := next_s if attempt.begun else first_s):
                attempt.expire(limit)
