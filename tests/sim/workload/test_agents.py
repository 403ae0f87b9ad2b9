"""Sessions of agents: their statistics, what their prompts share, and their order."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from statistics import mean, median
from typing import Any

import pytest

from policy.errors import ConfigError
from policy.wire.capture import BLOCK_TOKENS
from sim.arrivals import Arrival
from sim.benchmarks.agents.benchmark import ADDED, ANSWERED, least_computed
from sim.workload.generators.agents import Agents, check_agents
from sim.workload.generators.arrivals import RateShape
from sim.workload.generators.generate import GeneratedWorkload, generate
from sim.workload.generators.request_distributions import Length

SMALL = Agents(
    kinds=2, system_tokens=1024, turns=10, turns_p99=30, max_tokens=8000, subagent_system_tokens=512,
    compacted_tokens=600, subagent_share=0.1, subagent_turns=3, subagent_turns_p99=6,
)  # fmt: skip


def made(
    agents: Agents, count: int = 200, added: Length = 300, answered: Length = 100, seed: str = "1"
) -> list[Arrival]:
    spec = GeneratedWorkload(
        arrivals=RateShape(rate=1.0, cv=0.0), input_tokens=added, output_tokens=answered, agents=agents
    )
    return list(generate(spec, seed, float(count), lambda path: []))


def by_session(arrivals: list[Arrival]) -> dict[int, list[Arrival]]:
    found: dict[int, list[Arrival]] = defaultdict(list)
    for each in arrivals:
        found[each.session].append(each)
    return found


@pytest.mark.slow
def test_the_defaults_have_the_published_statistics() -> None:
    arrivals = made(Agents(), 400, ADDED, ANSWERED)
    parents = {each.session for each in arrivals if not each.follows}
    sessions = {session: turns for session, turns in by_session(arrivals).items() if session in parents}
    assert median(map(len, sessions.values())) == pytest.approx(43, rel=0.15)
    assert mean(each.output_tokens for each in arrivals) == pytest.approx(444, rel=0.05)
    # The last prompt of sessions of about the median length.
    last = [turns[-1].input_tokens for turns in sessions.values() if 38 <= len(turns) <= 48]
    assert median(last) == pytest.approx(142_000, rel=0.1)
    hits = 1.0 - sum(least_computed(arrivals)) / sum(each.input_tokens for each in arrivals)
    assert hits == pytest.approx(0.96, abs=0.01)


def test_a_turn_contains_the_one_before_until_the_context_is_compacted() -> None:
    compacted = 0
    for turns in by_session(made(SMALL)).values():
        for before, after in pairwise(turns):
            if after.input_tokens > before.input_tokens:
                assert after.input_tokens == before.input_tokens + before.output_tokens + 300
                assert after.blocks[: len(before.blocks)] == before.blocks
            else:
                compacted += 1
                shared = 1024 // BLOCK_TOKENS
                assert after.input_tokens == 1024 + 600 + 300
                assert after.blocks[:shared] == before.blocks[:shared]
                assert not set(after.blocks[shared:]) & set(before.blocks)
        assert all(each.input_tokens + each.output_tokens <= 8000 for each in turns)
        assert all(len(each.blocks) == each.input_tokens // BLOCK_TOKENS for each in turns)
    assert compacted


def test_sessions_share_the_system_prompt_of_their_kind_only() -> None:
    arrivals = made(SMALL)
    assert len({each.blocks[:1] for each in arrivals}) == 3  # two kinds of agents, and subagents
    owners: dict[int, set[int]] = defaultdict(set)
    for each in arrivals:
        for block in each.blocks[2:]:
            owners[block].add(each.session)
    assert all(len(sessions) == 1 for sessions in owners.values())


def test_each_turn_follows_one_that_came_before_and_no_other_follows_it() -> None:
    arrivals = made(SMALL)
    assert all(one.at <= other.at for one, other in pairwise(arrivals))
    ends: dict[int, int] = defaultdict(int)
    subagents = 0
    for each in arrivals:
        if each.follows:
            assert ends[each.follows] > 0
            ends[each.follows] -= 1
            subagents += each.follows > 0 and each.session != each.follows and not ends[each.session]
        else:
            assert each.session not in ends and each.think_s == 0.0
        ends[each.session] += 1
    assert subagents
    # Only the last turn of each session that is not a subagent's is followed by none.
    assert sum(ends.values()) == sum(not each.follows for each in arrivals)


@pytest.mark.parametrize(
    ("changes", "path", "expected"),
    [
        ({"turns_p99": 9}, "turns_p99", "at least turns = 43"),
        ({"tool_p99_s": 1.0}, "tool_p99_s", "at least tool_s = 3"),
        ({"max_tokens": 28_001}, "max_tokens", "at least 28002"),
    ],
)
def test_contradictory_values_name_their_path(changes: dict[str, Any], path: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_agents("agents", Agents(**changes))
    assert caught.value.path == f"agents.{path}" and expected in caught.value.expected
