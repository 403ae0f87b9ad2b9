"""The usage of one request as a slot of a mapped file: eight words of 64 bits.

A slot is *open* from the first part of an answer that its client gets, and *done* when all of the answer is
counted, before the client gets the last part. A writer that is killed leaves slots open: what they count
then is what was relayed. Slots are used in order, each once. The state is written last, and a done slot has a
check word: a reader that sees a half of what was written reads the slot again later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

# A slot is as large as a cache line, and lies in one sector of a disk; two words are spare.
WORDS: Final = 8
# The state has the number of the dimensions in its upper part.
STATE: Final = 0
# Unix time of the first part of the answer, in milliseconds.
AT_MS: Final = 1
# Tokens of the prompt, and in the upper half those of them that were cached: an estimate until the engine
# reports them.
PROMPT: Final = 2
# Tokens of the answer as the engine reported them last, and in the upper half how many events had been
# relayed then. Two numbers in a word change together.
OUTPUT: Final = 3
EVENTS: Final = 4
CHECK: Final = 5
HALF: Final = 32

OPEN: Final = 1
DONE: Final = 2
ESTIMATED: Final = 4
DIMS_SHIFT: Final = 8


class UsageDims(msgspec.Struct, frozen=True, kw_only=True):
    """What usage is summed by, and the rates (:class:`policy.tenancy.price.TokenRates`) of its tokens.

    Slots name it by its number in a file beside theirs.
    """

    tenant: str
    key: str
    model: str
    adapter: str
    rates: tuple[int, int, int]


class UsageRecord(NamedTuple):
    """The usage of one request. ``prompt`` includes the ``cached`` tokens.

    ``estimated``: the engine reported no usage, or an impossible one, or the answer was cut short.
    ``interrupted``: the gateway worker was killed meanwhile; then it is estimated, too.
    """

    dims: int
    at_s: float
    prompt: int
    cached: int
    output: int
    estimated: bool = False
    interrupted: bool = False


def check_of(words: Sequence[int]) -> int:
    """The check word of a done slot."""
    return words[STATE] + words[AT_MS] + words[PROMPT] + words[OUTPUT]


def read_record(state: int, words: Sequence[int], *, abandoned: bool) -> UsageRecord | None:
    """The usage in a slot whose ``state`` was read before the other ``words``; ``None`` while it may change.

    ``abandoned``: its writer ended, so that it is as it will stay.
    """
    done = state & DONE and words[STATE] == state and words[CHECK] == check_of(words)
    if not done and not abandoned:
        return None
    cached, prompt = divmod(words[PROMPT], 1 << HALF)
    reported_at, output = divmod(words[OUTPUT], 1 << HALF)
    if not done:
        output += max(0, words[EVENTS] - reported_at)
    return UsageRecord(
        state >> DIMS_SHIFT,
        words[AT_MS] / 1000,
        prompt,
        min(cached, prompt),
        output,
        estimated=not done or bool(state & ESTIMATED),
        interrupted=not done,
    )
