"""Prompt features for routing and admission: prefix hashes and estimated token counts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import xxhash

from gateway.protocol.body import RequestBody
from gateway.protocol.canonical_prompt import CanonicalPrompt, canonical_prompt
from gateway.protocol.paths import ProxyRoute
from policy.request import AnswerLength

BLOCK_BYTES: Final = 512
FINE_BYTES: Final = 4096
LONG_BYTES: Final = 32 * 1024
MAX_BYTES: Final = 64 * 1024 * 1024
BYTES_A_TOKEN: Final = 4.0
# Bytes of JSON per token, on average, of any text: single bytes at least, escaped words at most.
LEAST_BYTES_A_TOKEN: Final = 1.0
MOST_BYTES_A_TOKEN: Final = 16.0
COUNTED_BYTES: Final = 256 * 1024
# Of an answer without a limit by a model of unknown length, and of any other.
MOST_ANSWER_TOKENS: Final = 1 << 20
# The tokens of a completion whose request does not say how many, by OpenAI's API and vLLM.
DEFAULT_COMPLETION_TOKENS: Final = 16


def _boundaries() -> tuple[int, ...]:
    """Where a prompt is hashed: every 512 bytes at first, then eight times per doubling, four beyond 32 KiB.

    240 KiB have 44 boundaries and take 15 us. At most an eleventh of a shared prefix, a sixth of a long one,
    is missed.
    """
    found = list(range(BLOCK_BYTES, FINE_BYTES + 1, BLOCK_BYTES))
    while found[-1] < MAX_BYTES:
        found.append(int(found[-1] * 2 ** (1 / 8 if found[-1] < LONG_BYTES else 1 / 4)) // 64 * 64)
    return tuple(found)


BOUNDARIES = _boundaries()


class PromptFeatures:
    """As in :class:`policy.request.Request`: hashes and the prompt tokens up to each, and estimates.

    ``opening`` is the hash of a conversation's begin, up to the end of the user's first turn: the same in all
    its requests, 0 of a prompt that is none.
    """

    # Written out, because named tuples are not compiled.
    __slots__ = (
        "depths", "limit_tokens", "long_tokens", "opening", "output_tokens", "prefix", "prompt_bytes",
        "prompt_tokens",
    )  # fmt: skip

    def __init__(  # noqa: PLR0917 - made for each request, in one place
        self,
        prefix: tuple[int, ...],
        depths: tuple[int, ...],
        prompt_tokens: int,
        output_tokens: int,
        limit_tokens: int,
        long_tokens: int,
        prompt_bytes: int,
        opening: int,
    ) -> None:
        self.prefix = prefix
        self.depths = depths
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.limit_tokens = limit_tokens
        self.long_tokens = long_tokens
        self.prompt_bytes = prompt_bytes
        self.opening = opening


# Of what an engine reads without a forward pass, as in counting tokens: it has no cost to a replica.
NOTHING = PromptFeatures((), (), 1, 1, 0, 0, 0, 0)


class BytesPerToken:
    """Running estimates of one model: bytes of JSON per token, and tokens per answer."""

    def __init__(self) -> None:
        self.answers = AnswerLength()
        self.bytes_a_token = BYTES_A_TOKEN

    def learn(self, prompt_bytes: int, prompt_tokens: int, output_tokens: int, limit_tokens: int = 0) -> None:
        """Learn from an engine's counts for a prompt of ``prompt_bytes``; 0 where they show no density."""
        gain = self.answers.learn(output_tokens, limit_tokens)
        if prompt_bytes > 0 and prompt_tokens > 0:
            found = min(max(prompt_bytes / prompt_tokens, LEAST_BYTES_A_TOKEN), MOST_BYTES_A_TOKEN)
            self.bytes_a_token += gain * (found - self.bytes_a_token)

    def read(self, seed: int, prompt: CanonicalPrompt, limit: int | None, choices: int) -> PromptFeatures:
        """The fingerprint of ``prompt``.

        ``seed`` keeps apart what must not share a cache (:func:`seed_of`); with 0 there is no cache.
        ``limit`` is the most tokens an answer may have. Token ids are counted, text is estimated.
        """
        parts = prompt.parts
        size = sum([len(part) for part in parts])
        tokens = size / self.bytes_a_token
        if len(parts) == 1 and (ids := token_ids(parts[0])):
            tokens = float(ids)
        output = int(self.answers.mean) if limit is None else min(limit, int(self.answers.mean))
        count = bisect_right(BOUNDARIES, size) if seed else 0
        depths: tuple[int, ...] = ()
        prefix: tuple[int, ...] = ()
        if count:
            ends = BOUNDARIES[:count]
            if prompt.ends:
                ends = tuple(sorted({*ends, *[end for end in prompt.ends if end >= BLOCK_BYTES]}))
            a_byte = tokens / size
            depths = tuple([int(end * a_byte) for end in ends])
            prefix = _chain(seed, parts, ends)
            opening = _opening(seed, prompt, ends, prefix) if prompt.first_turn else 0
        else:
            opening = _opening(seed, prompt, (), ()) if seed and prompt.first_turn else 0
        allowed = (limit or 0) * choices
        outputs, longest = max(output, 1) * choices, self.answers.long(allowed)
        read = size if count else 0
        return PromptFeatures(prefix, depths, max(int(tokens), 1), outputs, allowed, longest, read, opening)


def limit_of(body: RequestBody) -> int | None:
    """The most tokens that one choice of the answer may have, if the client bounds it.

    At least 1: with 0, which asks for nothing but the prompt's echo, engines compute a token too.
    """
    for limit in (body.max_completion_tokens, body.max_output_tokens, body.max_tokens):
        if limit is not None:
            return min(max(1, limit), MOST_ANSWER_TOKENS)
    return None


def grid_of(seed: int, body: RequestBody, route: ProxyRoute, raw: bytes, *, most: int) -> tuple[int, ...]:
    """Hashes of the prompt's first ``most`` prefixes, one per :data:`BLOCK_BYTES`: equal in all workers."""
    parts = canonical_prompt(body, route, raw).parts
    count = min(sum(map(len, parts)) // BLOCK_BYTES, most)
    return _chain(seed, parts, range(BLOCK_BYTES, count * BLOCK_BYTES + 1, BLOCK_BYTES)) if count else ()


@lru_cache(maxsize=4096)
def seed_of(model: str, adapter: str, salt: str) -> int:
    """The seed of a prompt's hashes: KV is not shared between models, adapters or tenants."""
    return xxhash.xxh3_64_intdigest(f"{model}\0{adapter}\0{salt}".encode())


def adapter_key(model: str, adapter: str) -> int:
    """The key of an adapter: odd, where those of prefixes are even."""
    return xxhash.xxh3_64_intdigest(f"{model}\0{adapter}".encode()) | 1


def token_ids(part: memoryview) -> int:
    """How many token ids ``part`` lists, 0 if it is not a list of numbers (or of lists of them).

    Of a long list its begin is counted.
    """
    if len(part) < 2 or part[0] != _OPEN or part[1] == _OBJECT:
        return 0
    begin = bytes(part[:COUNTED_BYTES])
    if not begin[:64].lstrip(b"[ \t\r\n")[:1].isdigit():
        return 0
    return (begin.count(b",") + 1) * len(part) // len(begin)


def _opening(seed: int, prompt: CanonicalPrompt, ends: tuple[int, ...], prefix: tuple[int, ...]) -> int:
    """The hash of all before the user's first turn, and of that turn."""
    head = prompt.head
    if head >= BLOCK_BYTES:
        before = prefix[bisect_right(ends, head) - 1]
    else:
        before = _chain(seed, prompt.parts, (head,))[0]
    running = xxhash.xxh3_64(seed=before)
    for part in prompt.first_turn:
        running.update(part)
    return running.intdigest()


def _chain(seed: int, parts: Sequence[memoryview], ends: Sequence[int]) -> tuple[int, ...]:
    """The hash of the first ``end`` bytes of all ``parts`` together, for each of ``ends``."""
    running = xxhash.xxh3_64(seed=seed)
    update, value = running.update, running.intdigest
    found = []
    rest = iter(parts)
    part, start = next(rest), 0  # where in the whole this part starts
    done = 0
    for end in ends:
        while end - start > len(part):
            update(part[done - start :])
            start += len(part)
            done = start
            part = next(rest)
        update(part[done - start : end - start])
        done = end
        found.append(value() & _EVEN)
    return tuple(found)


_OPEN: Final = ord("[")
_OBJECT: Final = ord("{")
_EVEN: Final = 0xFFFF_FFFF_FFFF_FFFE
