"""Prompts have the token counts and the common prefixes of the trace."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from policy.wire.capture import BLOCK_TOKENS
from serve.engine.sim.pseudo_tokenizer import tokenize
from sim.arrivals import Arrival
from tidegate.replay.prompts import PromptGenerator, TokensPerWordFit

PROMPTS = PromptGenerator(1)


def arrival(tokens: int, *blocks: int) -> Arrival:
    return Arrival(0.0, tokens, 1, blocks=blocks)


@settings(max_examples=25)
@given(st.integers(1, 5000), st.integers(0, 10), st.integers(0, 10**6))
def test_a_prompt_has_the_tokens_of_the_trace(tokens: int, blocks: int, number: int) -> None:
    asked = arrival(tokens, *range(min(blocks, -(-tokens // BLOCK_TOKENS))))
    assert len(tokenize(PROMPTS.text(asked, number))) == tokens


def test_prompts_share_exactly_their_common_blocks() -> None:
    one, other = PROMPTS.text(arrival(2000, 7, 8), 1).split(), PROMPTS.text(arrival(1800, 7, 8), 2).split()
    common = 2 * BLOCK_TOKENS
    assert one[:common] == other[:common]
    assert one[common : common + 10] != other[common : common + 10]
    fork = PROMPTS.text(arrival(2000, 7, 9), 3).split()
    assert fork[:BLOCK_TOKENS] == one[:BLOCK_TOKENS]
    assert fork[BLOCK_TOKENS : BLOCK_TOKENS + 10] != one[BLOCK_TOKENS : BLOCK_TOKENS + 10]


def test_the_last_block_may_be_partial() -> None:
    short, long = PROMPTS.text(arrival(700, 7, 8), 1), PROMPTS.text(arrival(1024, 7, 8), 2)
    assert long.startswith(short)


def test_prompts_differ_between_requests_and_between_seeds() -> None:
    beginnings = {tuple(PROMPTS.text(arrival(64), number).split()[:10]) for number in range(2000)}
    assert len(beginnings) == 2000
    assert PROMPTS.text(arrival(512, 1), 0) == PromptGenerator(1).text(arrival(512, 1), 9)
    assert (
        PROMPTS.text(arrival(512, 1), 0).split()[:10]
        != PromptGenerator(2).text(arrival(512, 1), 0).split()[:10]
    )


def test_word_counts_follow_the_tokens_that_the_endpoint_counts() -> None:
    prompts = PromptGenerator(1, TokensPerWordFit(overhead=30.0, per_word=0.5))
    one, other = (prompts.text(arrival(tokens, 7, 8), 1).split() for tokens in (1530, 3030))
    assert (len(one), len(other)) == (3000, 6000)
    assert one[:2048] == other[:2048]  # 1024 words make a block
    assert len(prompts.text(arrival(5), 1).split()) == 2  # never none
