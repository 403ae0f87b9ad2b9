"""An attempt ends after a time without progress, and not while either side makes progress."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gateway.delivery.replica_idle_timeouts import IdleTimeouts, TimedAttempt


class Silent(TimedAttempt):
    """An attempt whose progress a test decides."""

    def __init__(self, *, streams: bool = True, begun: bool = False, alive: bool = False) -> None:
        self.streams = streams
        self.begun = begun
        self.sent_at = self.quiet_since = 0.0
        self.alive = alive
        self.relayed = 0
        self.of_model = ""
        self.expired: list[float] = []

    @property
    def model(self) -> str:
        return self.of_model

    @property
    def events(self) -> int:
        return self.relayed

    def has_progressed(self) -> bool:
        return self.alive

    def expire(self, waited_s: float) -> None:
        self.expired.append(waited_s)


@pytest.fixture
def deadlines() -> IdleTimeouts:
    limits = SimpleNamespace(first_token_timeout_s=10.0, inter_token_timeout_s=4.0, answer_timeout_s=60.0)
    return IdleTimeouts(lambda: limits)


@pytest.mark.parametrize(
    ("attempt", "limit"),
    [
        (Silent(), 10.0),
        (Silent(begun=True), 4.0),
        (Silent(streams=False), 60.0),
        (Silent(streams=False, alive=True), 60.0),
        (Silent(alive=True), 60.0),
    ],
    ids=["first token", "next token", "whole answer", "whole answer that arrives", "comments alone"],
)
async def test_each_kind_of_silence_has_its_timeout(
    deadlines: IdleTimeouts, attempt: Silent, limit: float
) -> None:
    deadlines.attempts.add(attempt)
    await deadlines.sweep(limit)
    assert attempt.expired == []
    await deadlines.sweep(limit + 0.1)
    assert attempt.expired == [limit]


def test_running_streams_and_their_tokens_are_counted_by_model(deadlines: IdleTimeouts) -> None:
    for model, begun, events in (("a", True, 3), ("a", True, 4), ("a", False, 0), ("b", True, 1)):
        stream = Silent(begun=begun)
        stream.relayed, stream.of_model = events, model
        deadlines.attempts.add(stream)
    assert deadlines.running() == {"a": (2, 7), "b": (1, 1)}
