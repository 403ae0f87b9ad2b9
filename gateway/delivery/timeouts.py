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

    ``stirred`` tells once whether any byte came since it was asked last, or none could since the
    client is slow; ``quiet_since`` belongs to the sweep. Instants are seconds of ``time.monotonic``.
    """

    streams: bool
    begun: bool
    sent_at: float
    quiet_since: float

    def stirred(self) -> bool:
        """Whether any byte came since the last call."""
        ...

    def expire(self, waited_s: float) -> None:
        """The replica was silent for too long."""
        ...


class IdleTimeouts:
    """The attempts that run in this worker.

    A stream's replica may be silent for ``first_token_timeout_s`` before its first event and for
    ``inter_token_timeout_s`` after it, any byte counting as life; an answer that does not stream must
    be whole within ``answer_timeout_s``.
    """

    def __init__(self, limits: Callable[[], Limits]) -> None:
        self._limits = limits
        self._attempts: set[WatchedAttempt] = set()

    def watch(self, attempt: WatchedAttempt) -> None:
        """Apply timeouts to ``attempt`` from now on."""
        self._attempts.add(attempt)

    def unwatch(self, attempt: WatchedAttempt) -> None:
        """It has ended."""
        self._attempts.discard(attempt)

    async def run(self) -> None:
        """Sweep until cancelled."""
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
