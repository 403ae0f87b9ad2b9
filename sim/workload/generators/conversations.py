"""Conversations: the prompt of each turn is its whole history, after a shared system prompt."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from policy.config.control import Section
from policy.errors import ConfigError
from policy.wire.capture import BLOCK_TOKENS, MAX_TOKENS
from sim.arrival import Arrival
from sim.workload.generators.popularity import geometric, zipf_weights

# No prompt has more blocks: tokens of the longest over those of a block.
_PLACES = 1 << 16


class Conversations(Section, frozen=True):
    """Each arrival begins one, of about ``turns`` turns (geometric), with ``think_s`` from turn to turn.

    ``think_s`` is the mean of an exponential distribution and holds the answer and the reading of it. Each
    begins with one of ``systems`` prompts of ``system_tokens``, by Zipf's law, and is over before prompt and
    answer have more than ``max_tokens``.
    """

    turns: Annotated[float, Meta(ge=1, le=1000)] = 1.0
    think_s: Annotated[float, Meta(gt=0, le=86_400)] = 30.0
    systems: Annotated[int, Meta(ge=1, le=100_000)] = 1
    system_tokens: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] = 32_768


def check_conversations(path: str, spec: Conversations) -> None:
    """Refuse those of which none could begin; raises :class:`policy.errors.ConfigError`."""
    if spec.system_tokens + 2 > spec.max_tokens:
        expected = f"at most max_tokens - 2 = {spec.max_tokens - 2}"
        raise ConfigError(f"{path}.system_tokens", spec.system_tokens, expected)


@dataclass(slots=True)
class _Talk:
    """A conversation: ``said`` tokens so far, ``left`` turns to come."""

    number: int
    system: int
    adapter: str
    tokens: int
    left: int
    fresh: bool = True


class ConversationState:
    """The turns of all conversations in order, drawn by ``rng``.

    ``question`` and ``answered`` draw the tokens of a question and its answer, ``adapter`` the adapter of a
    conversation. What is kept are the conversations that go on.
    """

    def __init__(
        self,
        spec: Conversations,
        rng: random.Random,
        question: Callable[[], int],
        answered: Callable[[], int],
        adapter: Callable[[], str],
    ) -> None:
        self._spec = spec
        self._rng = rng
        self._question = question
        self._answered = answered
        self._adapter = adapter
        self._weights = zipf_weights(spec.systems, 1.0)
        self._begun = 0
        self._due: list[tuple[float, int, _Talk]] = []

    def turns(self, starts: Iterator[float]) -> Iterator[Arrival]:
        """Every turn of the conversations that begin at ``starts``, which are in order."""
        for start in starts:
            yield from self._before(start)
            self._begin(start)
        yield from self._before(float("inf"))

    def _begin(self, at: float) -> None:
        self._begun += 1
        (system,) = self._rng.choices(range(self._spec.systems), self._weights)
        turns = geometric(self._rng, self._spec.turns)
        talk = _Talk(self._begun, system, self._adapter(), self._spec.system_tokens, turns)
        heapq.heappush(self._due, (at, talk.number, talk))

    def _before(self, at: float) -> Iterator[Arrival]:
        while self._due and self._due[0][0] <= at:
            due, _, talk = heapq.heappop(self._due)
            if (arrival := self._turn(due, talk)) is None:
                continue
            yield arrival
            talk.left -= 1
            if talk.left:
                due += self._rng.expovariate(1.0 / self._spec.think_s)
                heapq.heappush(self._due, (due, talk.number, talk))

    def _turn(self, at: float, talk: _Talk) -> Arrival | None:
        """The next turn; ``None`` where there is no room for it. A first one is cut to fit instead."""
        question, answer, room = self._question(), self._answered(), self._spec.max_tokens - talk.tokens
        if talk.fresh:
            answer = min(answer, room - 1)
            question = min(question, room - answer)
            talk.fresh = False
        if question + answer > room:
            return None
        prompt = talk.tokens + question
        talk.tokens = prompt + answer
        return Arrival(
            at=at,
            input_tokens=prompt,
            output_tokens=answer,
            adapter=talk.adapter,
            session=talk.number,
            blocks=self._blocks(talk, prompt),
        )

    def _blocks(self, talk: _Talk, prompt: int) -> tuple[int, ...]:
        """The whole blocks of the prompt: even numbers for those of the system's alone, odd for its own."""
        shared = min(prompt, self._spec.system_tokens) // BLOCK_TOKENS
        system, own = talk.system * _PLACES, talk.number * _PLACES
        return tuple(
            2 * (system + i) if i < shared else 2 * (own + i) + 1 for i in range(prompt // BLOCK_TOKENS)
        )
