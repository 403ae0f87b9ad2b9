"""Sessions of agents: many turns, tool calls between them, subagents, and a context that is compacted.

The defaults are those of published traces of coding agents, as far as they are known: a median of 43 turns,
142,000 prompt tokens at the end of such a session, 444 tokens per answer, and 96 % of all prompt tokens in
the prefix cache if nothing is evicted.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from itertools import count
from typing import Annotated

from msgspec import Meta

from policy.config.control import Fraction, Seconds, Section
from policy.errors import ConfigError
from policy.wire.capture import BLOCK_TOKENS, MAX_TOKENS
from sim.arrivals import Arrival
from sim.workload.generators.request_distributions import lognormal, zipf_weights

# No prompt has more blocks: tokens of the longest over those of a block.
_PLACES = 1 << 16


_Turns = Annotated[int, Meta(ge=1, le=100_000)]


class Agents(Section, frozen=True):
    """Each arrival begins a session of one of ``kinds`` agents, chosen by Zipf's law.

    All sessions of a kind begin with the same system prompt and tools, ``system_tokens`` long. The next turn
    comes ``tool_s`` after the answer, or ``human_s`` for the fraction ``human_share`` of turns that wait for
    a person. For the fraction ``subagent_share`` the tool is a subagent: a session of its own, of
    ``subagent_turns`` turns, with a system prompt of ``subagent_system_tokens``. A context that would exceed
    ``max_tokens`` is compacted to its system prompt and ``compacted_tokens``. Turns and seconds are
    lognormal, with this median and 99th percentile (``_p99``).
    """

    kinds: Annotated[int, Meta(ge=1, le=1000)] = 4
    system_tokens: Annotated[int, Meta(ge=0, le=1_000_000)] = 20_000
    turns: _Turns = 43
    turns_p99: _Turns = 250
    tool_s: Seconds = 3.0
    tool_p99_s: Seconds = 60.0
    human_share: Fraction = 0.1
    human_s: Seconds = 45.0
    human_p99_s: Seconds = 900.0
    subagent_share: Fraction = 0.03
    subagent_turns: _Turns = 8
    subagent_turns_p99: _Turns = 40
    subagent_system_tokens: Annotated[int, Meta(ge=0, le=1_000_000)] = 8_000
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] = 200_000
    compacted_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] = 8_000


def check_agents(path: str, spec: Agents) -> None:
    """Raises :class:`policy.errors.ConfigError` for contradictory values."""
    for median, p99 in (
        ("turns", "turns_p99"),
        ("tool_s", "tool_p99_s"),
        ("human_s", "human_p99_s"),
        ("subagent_turns", "subagent_turns_p99"),
    ):
        if getattr(spec, p99) < getattr(spec, median):
            expected = f"at least {median} = {getattr(spec, median):g}"
            raise ConfigError(f"{path}.{p99}", getattr(spec, p99), expected)
    least = max(spec.system_tokens, spec.subagent_system_tokens) + spec.compacted_tokens + 2
    if spec.max_tokens < least:
        expected = f"at least {least}: a system prompt, compacted_tokens and a turn"
        raise ConfigError(f"{path}.max_tokens", spec.max_tokens, expected)


class _Context:
    """The prompt of an agent so far: the system prompt of a kind, then tokens of its own.

    Its blocks have even hashes in the system prompt and odd ones in the rest.
    """

    __slots__ = ("_hashes", "_own", "system_tokens", "tokens")

    def __init__(self, number: int, kind: int, system_tokens: int) -> None:
        self.system_tokens = self.tokens = system_tokens
        self._hashes = [2 * (kind * _PLACES + i) for i in range(system_tokens // BLOCK_TOKENS)]
        self._own = number * _PLACES

    def compact(self, number: int, tokens: int) -> None:
        """Keep the system prompt, and ``tokens`` that are new."""
        del self._hashes[self.system_tokens // BLOCK_TOKENS :]
        self.tokens = self.system_tokens + tokens
        self._own = number * _PLACES

    def blocks(self) -> tuple[int, ...]:
        """The hashes of the whole blocks."""
        places = range(len(self._hashes), self.tokens // BLOCK_TOKENS)
        self._hashes += [2 * (self._own + i) + 1 for i in places]
        return tuple(self._hashes)


class AgentSessions:
    """The turns of all sessions, drawn by ``rng``.

    ``added`` draws the tokens that a tool result or a person adds to the prompt, ``answered`` those of an
    answer, ``adapter`` the adapter of a session. Memory holds the sessions that go on.
    """

    def __init__(
        self,
        spec: Agents,
        rng: random.Random,
        added: Callable[[], int],
        answered: Callable[[], int],
        adapter: Callable[[], str],
    ) -> None:
        self.spec = spec
        self._rng = rng
        self._added, self._answered, self._adapter = added, answered, adapter
        self._turns = lognormal(rng, spec.turns, spec.turns_p99)
        self._subagent_turns = lognormal(rng, spec.subagent_turns, spec.subagent_turns_p99)
        self._tool_s = lognormal(rng, spec.tool_s, spec.tool_p99_s)
        self._human_s = lognormal(rng, spec.human_s, spec.human_p99_s)
        self._weights = zipf_weights(spec.kinds, 1.0)
        self._contexts = count(1)
        self._sessions = count(1)

    def turns(self, starts: Iterator[float]) -> Iterator[Arrival]:
        """Every turn of the sessions that begin at ``starts``, which are in order."""
        due: list[tuple[float, int, Arrival, Iterator[Arrival]]] = []
        order = count()

        def push(session: Iterator[Arrival]) -> None:
            if (turn := next(session, None)) is not None:
                heapq.heappush(due, (turn.at, next(order), turn, session))

        for start in starts:
            while due and due[0][0] <= start:
                _, _, turn, session = heapq.heappop(due)
                yield turn
                push(session)
            push(self._session(start))
        while due:
            _, _, turn, session = heapq.heappop(due)
            yield turn
            push(session)

    def _session(self, at: float) -> Iterator[Arrival]:
        """One session with its subagents."""
        spec, rng = self.spec, self._rng
        (kind,) = rng.choices(range(spec.kinds), self._weights)
        context = self._context(kind, spec.system_tokens)
        adapter, session = self._adapter(), next(self._sessions)
        follows, think_s = 0, 0.0
        for left in range(max(1, round(self._turns())), 0, -1):
            turn = Arrival(at, 0, 0, adapter=adapter, session=session, follows=follows, think_s=think_s)
            yield self._with_prompt(turn, context)
            follows = session
            if left > 1 and rng.random() < spec.subagent_share:
                last = None
                for last in self._subagent(at, adapter, session):
                    yield last
                assert last is not None
                at, follows = last.at, last.session
            think_s = self._human_s() if rng.random() < spec.human_share else self._tool_s()
            at += think_s

    def _subagent(self, at: float, adapter: str, parent: int) -> Iterator[Arrival]:
        spec = self.spec
        # All subagents are of one kind, apart from the agents'.
        context = self._context(spec.kinds, spec.subagent_system_tokens)
        session, follows, think_s = next(self._sessions), parent, 0.0
        for _ in range(max(1, round(self._subagent_turns()))):
            turn = Arrival(at, 0, 0, adapter=adapter, session=session, follows=follows, think_s=think_s)
            yield self._with_prompt(turn, context)
            follows, think_s = session, self._tool_s()
            at += think_s

    def _context(self, kind: int, system_tokens: int) -> _Context:
        return _Context(next(self._contexts), kind, system_tokens)

    def _with_prompt(self, turn: Arrival, context: _Context) -> Arrival:
        """The turn with its tokens; a context that is full is compacted before it."""
        spec = self.spec
        added, answer = self._added(), self._answered()
        if context.tokens + added + answer > spec.max_tokens:
            if context.tokens > context.system_tokens:
                context.compact(next(self._contexts), spec.compacted_tokens)
            answer = min(answer, spec.max_tokens - context.tokens - 1)
            added = min(added, spec.max_tokens - context.tokens - answer)
        context.tokens += added
        made = turn._replace(input_tokens=context.tokens, output_tokens=answer, blocks=context.blocks())
        context.tokens += answer
        return made
