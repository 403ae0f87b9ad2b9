"""Generated workloads: arrivals, lengths, adapters, conversations and agents, reproducible by seed."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from policy.config.control import Section
from policy.errors import ConfigError
from policy.wire.capture import BLOCK_TOKENS, MAX_TOKENS
from sim.arrivals import Arrival
from sim.workload.generators.agents import Agents, AgentSessions, check_agents
from sim.workload.generators.arrivals import RateShape, arrival_times
from sim.workload.generators.request_distributions import (
    AdapterPopularity,
    Length,
    check_length,
    geometric,
    sample_adapter,
    sample_length,
    zipf_weights,
)

# No prompt has more blocks: tokens of the longest over those of a block.
_PLACES = 1 << 16


class Conversations(Section, frozen=True):
    """Each arrival begins a conversation of about ``turns`` turns (geometric), ``think_s`` apart.

    ``think_s`` is the mean of an exponential distribution and includes the answer. Each begins with one of
    ``systems`` prompts of ``system_tokens``, by Zipf's law, and ends before prompt and answer exceed
    ``max_tokens``; a turn's prompt is the whole history.
    """

    turns: Annotated[float, Meta(ge=1, le=1000)] = 1.0
    think_s: Annotated[float, Meta(gt=0, le=86_400)] = 30.0
    systems: Annotated[int, Meta(ge=1, le=100_000)] = 1
    system_tokens: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] = 32_768


@dataclass(slots=True)
class _Talk:
    """A conversation: ``tokens`` so far, ``left`` turns to come."""

    number: int
    system: int
    adapter: str
    tokens: int
    left: int
    fresh: bool = True


@dataclass(eq=False)
class ConversationState:
    """The turns of all conversations in order, drawn by ``rng``.

    ``question`` and ``answered`` draw the tokens of a question and its answer, ``adapter`` the adapter of a
    conversation. Memory holds the conversations that go on.
    """

    spec: Conversations
    rng: random.Random
    question: Callable[[], int]
    answered: Callable[[], int]
    adapter: Callable[[], str]
    _begun: int = 0
    _due: list[tuple[float, int, _Talk]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._weights = zipf_weights(self.spec.systems, 1.0)

    def turns(self, starts: Iterator[float]) -> Iterator[Arrival]:
        """Every turn of the conversations that begin at ``starts``, which are in order."""
        for start in starts:
            yield from self._before(start)
            self._begin(start)
        yield from self._before(float("inf"))

    def _begin(self, at: float) -> None:
        self._begun += 1
        (system,) = self.rng.choices(range(self.spec.systems), self._weights)
        turns = geometric(self.rng, self.spec.turns)
        talk = _Talk(self._begun, system, self.adapter(), self.spec.system_tokens, turns)
        heapq.heappush(self._due, (at, talk.number, talk))

    def _before(self, at: float) -> Iterator[Arrival]:
        while self._due and self._due[0][0] <= at:
            due, _, talk = heapq.heappop(self._due)
            if (arrival := self._turn(due, talk)) is None:
                continue
            yield arrival
            talk.left -= 1
            if talk.left:
                due += self.rng.expovariate(1.0 / self.spec.think_s)
                heapq.heappush(self._due, (due, talk.number, talk))

    def _turn(self, at: float, talk: _Talk) -> Arrival | None:
        """The next turn; ``None`` where there is no room for it. A first one is cut to fit instead."""
        question, answer, room = self.question(), self.answered(), self.spec.max_tokens - talk.tokens
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
        """The whole blocks of the prompt: even hashes for the shared system prompt, odd for the rest."""
        shared = min(prompt, self.spec.system_tokens) // BLOCK_TOKENS
        system, own = talk.system * _PLACES, talk.number * _PLACES
        return tuple(
            2 * (system + i) if i < shared else 2 * (own + i) + 1 for i in range(prompt // BLOCK_TOKENS)
        )


class GeneratedWorkload(Section, frozen=True):
    """Requests at the instants of ``arrivals``.

    With ``conversations`` or ``agents`` an arrival is the first turn of one; ``input_tokens`` are then what
    each turn adds.
    """

    arrivals: RateShape
    input_tokens: Length
    output_tokens: Length
    adapters: AdapterPopularity | None = None
    conversations: Conversations | None = None
    agents: Agents | None = None


def check_workload(path: str, spec: GeneratedWorkload) -> None:
    """Raises :class:`policy.errors.ConfigError` for contradictory values."""
    check_length(f"{path}.input_tokens", spec.input_tokens)
    check_length(f"{path}.output_tokens", spec.output_tokens)
    adapters, talks = spec.adapters, spec.conversations
    if adapters is not None and bool(adapters.names) == bool(adapters.count):
        expected = "count of at least 1 or names, one of them"
        raise ConfigError(f"{path}.adapters.count", adapters.count, expected)
    # The shortest first turn has a token each of question and answer.
    if talks is not None and talks.system_tokens + 2 > talks.max_tokens:
        expected = f"at most max_tokens - 2 = {talks.max_tokens - 2}"
        raise ConfigError(f"{path}.conversations.system_tokens", talks.system_tokens, expected)
    if spec.agents is not None:
        if talks is not None:
            raise ConfigError(f"{path}.agents", None, "conversations or agents, one of them")
        check_agents(f"{path}.agents", spec.agents)


def generate(
    spec: GeneratedWorkload, seed: str, until_s: float, trace: Callable[[str], Iterable[Arrival]]
) -> Iterator[Arrival]:
    """The requests of ``until_s`` seconds; ``trace`` reads the one at a path.

    Each drawn quantity has its own random stream: another length moves no arrival.
    """
    at = arrival_times(spec.arrivals, _stream(seed, "arrivals"), until_s)
    question = sample_length(
        spec.input_tokens, _stream(seed, "input"), lambda path: (each.input_tokens for each in trace(path))
    )
    answered = sample_length(
        spec.output_tokens, _stream(seed, "output"), lambda path: (each.output_tokens for each in trace(path))
    )
    adapter = sample_adapter(spec.adapters, _stream(seed, "adapters"))
    if spec.conversations is not None:
        rng = _stream(seed, "conversations")
        return ConversationState(spec.conversations, rng, question, answered, adapter).turns(at)
    if spec.agents is not None:
        return AgentSessions(spec.agents, _stream(seed, "agents"), question, answered, adapter).turns(at)
    return (Arrival(each, question(), answered(), adapter=adapter()) for each in at)


def _stream(seed: str, name: str) -> random.Random:
    return random.Random(f"{seed} {name}")  # noqa: S311 - a reproducible workload
