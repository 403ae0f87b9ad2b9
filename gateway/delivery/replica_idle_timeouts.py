"""Idle timeouts of replicas: one periodic sweep over all attempts of a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Final

from policy.config.deployment import GatewayConfig

# A timeout is exceeded by a twentieth of it at most, but for short ones.
SWEEPS_PER_TIMEOUT: Final = 40
MIN_INTERVAL_S: Final = 0.1
MAX_INTERVAL_S: Final = 1.0
# Attempts that end in one turn of the event loop.
EXPIRED_AT_ONCE: Final = 64


class TimedAttempt:
    """An attempt on a replica, as the sweep sees it. Instants are seconds of ``time.monotonic``.

    ``streams``: a stream was requested, ``begun``: its first event came. ``sent_at``: when the request was
    sent, ``quiet_since``: when it last made progress.
    """

    streams: bool
    begun: bool
    sent_at: float
    quiet_since: float

    @property
    def model(self) -> str:
        """The name of the model in the deployment."""
        raise NotImplementedError

    @property
    def events(self) -> int:
        """The events of the stream so far."""
        raise NotImplementedError

    def has_progressed(self) -> bool:
        """Whether bytes came since the last call, or could not since the client is slow."""
        raise NotImplementedError

    def expire(self, waited_s: float) -> None:
        """The replica was silent for ``waited_s`` seconds: end the attempt."""
        raise NotImplementedError


class IdleTimeouts:
    """The attempts of this worker, with the longest silence of each.

    A stream may be silent for ``first_token_timeout_s`` before its first event and ``inter_token_timeout_s``
    after it. Whatever comments come, it must begin within ``answer_timeout_s``, in which any other answer
    must be whole.
    """

    def __init__(self, limits: Callable[[], GatewayConfig]) -> None:
        self._limits = limits
        self.attempts: set[TimedAttempt] = set()

    async def run(self) -> None:
        while True:
            limits = self._limits()
            shortest = min(
                limits.first_token_timeout_s, limits.inter_token_timeout_s, limits.answer_timeout_s
            )
            usual_s = max(shortest / SWEEPS_PER_TIMEOUT, MIN_INTERVAL_S)
            await asyncio.sleep(min(usual_s, MAX_INTERVAL_S, shortest / 4))
            await self.sweep(monotonic())

    def running(self) -> dict[str, tuple[int, int]]:
        """By model, the streams that have begun, and the tokens (one an event) that they have produced."""
        found: dict[str, tuple[int, int]] = {}
        for each in self.attempts:
            if each.begun:
                streams, tokens = found.get(each.model, (0, 0))
                found[each.model] = (streams + 1, tokens + each.events)
        return found

    async def sweep(self, now: float) -> None:
        """End the attempts that were silent for too long: hundreds of them over several turns."""
        limits = self._limits()
        ended = 0
        for attempt in list(self.attempts):
            silent_s = self._too_long(attempt, limits, now) if attempt in self.attempts else 0.0
            if silent_s:
                attempt.expire(silent_s)
                ended += 1
                if ended % EXPIRED_AT_ONCE == 0:
                    await asyncio.sleep(0)

    @staticmethod
    def _too_long(attempt: TimedAttempt, limits: GatewayConfig, now: float) -> float:
        """The limit that an attempt exceeds, in seconds; 0 if it exceeds none."""
        first_s, answer_s = limits.first_token_timeout_s, limits.answer_timeout_s
        begin_s = max(first_s, answer_s)
        if not attempt.streams:
            return answer_s if now - attempt.sent_at > answer_s else 0.0
        if not attempt.begun and now - attempt.sent_at > begin_s:
            return begin_s
        if attempt.has_progressed():
            attempt.quiet_since = now
            return 0.0
        limit = limits.inter_token_timeout_s if attempt.begun else first_s
        return limit if now - attempt.quiet_since > limit else 0.0
