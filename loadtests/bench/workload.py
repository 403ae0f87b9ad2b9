"""The requests that the benchmark sends: bodies of a size, prompts with shared prefixes, adapters."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from loadtests.bench.replica import MARK_CHARS, marked
from sim.workload.generators.request_distributions import zipf_weights

KEY = "sk-bench-0123456789abcdef"
WORDS = ["quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "wizards", "judge"]


def request(body: bytes) -> bytes:
    """A chat request around ``body``; every system gets the same API key, which Tidegate checks."""
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\n"
        b"authorization: Bearer %b\r\ncontent-length: %d\r\n\r\n%b" % (KEY.encode(), len(body), body)
    )


@lru_cache(maxsize=4096)
def words(chars: int, seed: int) -> str:
    """Text of exactly ``chars`` characters; texts of different seeds differ from the start."""
    rng = random.Random(seed)  # noqa: S311 - text to fill prompts with
    parts: list[str] = [f"{seed:08x}"]
    length = 8
    while length < chars:
        word = rng.choice(WORDS)
        parts.append(word)
        length += len(word) + 1
    return " ".join(parts)[:chars]


def chat(content: str, *, model: str = "alpha", stream: bool = False) -> bytes:
    """The JSON of a chat."""
    body: dict[str, object] = {"model": model, "messages": [{"role": "user", "content": content}]}
    return json.dumps({**body, "stream": True} if stream else body).encode()


class SizedChats:
    """Chats of ``size`` bytes with ``prefixes`` different texts in rotation."""

    def __init__(self, size: int, prefixes: int, *, stream: bool = False) -> None:
        bare = len(chat("", stream=stream))
        self._requests = [
            request(chat(words(max(8, size - bare), seed), stream=stream)) for seed in range(prefixes)
        ]

    def __call__(self, index: int) -> bytes:
        return self._requests[index % len(self._requests)]


class PrefixedChats:
    """Chats whose first ``prefix_chars`` are one of several texts, in the order of ``draws``."""

    def __init__(self, draws: Sequence[int], prefix_chars: int, own_chars: int) -> None:
        self._draws = draws
        self._prefix_chars = prefix_chars
        self._own_chars = own_chars

    def __call__(self, index: int) -> bytes:
        """The request with that number; its own text is unlike any other's."""
        prefix = self._draws[index]
        mark = marked(prefix, self._prefix_chars, self._prefix_chars + self._own_chars)
        shared = words(self._prefix_chars - MARK_CHARS, prefix)
        # Prompts differ from the first character on; marks do not.
        content = shared[:8] + mark + shared[8:] + words(self._own_chars, 1_000_000 + index)
        return request(chat(content, stream=True))


class AdapterChats:
    """Short chats for adapters, in the order of ``names``."""

    def __init__(self, names: Sequence[str], chars: int) -> None:
        self._names = names
        self._chars = chars

    def __call__(self, index: int) -> bytes:
        content = marked(index, 0, self._chars) + words(self._chars - MARK_CHARS, index)
        return request(chat(content, model=self._names[index], stream=True))


def draws(count: int, kinds: int, exponent: float, rng: random.Random) -> list[int]:
    """``count`` of the numbers below ``kinds`` by Zipf's law; their order of popularity is shuffled."""
    names = list(range(kinds))
    rng.shuffle(names)
    return rng.choices(names, zipf_weights(kinds, exponent), k=count)


def even(count: int, rate: float, rng: random.Random) -> list[float]:
    """``count`` Poisson arrivals at ``rate`` per second: when each is due, in seconds."""
    return list(accumulate(rng.expovariate(rate) for _ in range(count)))
