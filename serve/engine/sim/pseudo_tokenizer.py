"""Text and tokens without a model: a reversible pseudo-tokenizer and a seeded stream of words.

A token is a word or a part of one with the space before it, at most six bytes of UTF-8: about four
characters in English. Its id is its bytes as a number with a leading 1, so that no vocabulary is needed and
detokenizing is exact.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Ids of other tokenizers are below: the largest published vocabulary has 262,144.
_MOST_PUBLISHED = 1 << 19
_PIECE = re.compile(rb"\s?[^\s]{1,5}|\s")
_MASK = (1 << 64) - 1
# At most five characters, so that each is one token after a space.
_SPOKEN = (
    "the of and to in is it that for was on are as with his they at be this from have or by one had "
    "not but what all were when we there can an your which their said if do will each about how up "
    "out them then she many some so these would other into has more her two like him see time could "
    "no make than first been its who now my made over did down only way find use may water long "
    "very after words just where most know tide gate. shore sea, boat, wave. moon, sand. salt, wind."
)
_WORDS = _SPOKEN.split()


def tokenize(text: str) -> list[bytes]:
    """The tokens of ``text``; joined, they are its UTF-8 bytes."""
    return _PIECE.findall(text.encode())


def token_id(token: bytes) -> int:
    """The id of a token, below 2**49."""
    return int.from_bytes(b"\x01" + token)


def token_bytes(number: int) -> bytes | None:
    """The token with that id; ``None`` if there is none."""
    size = (number.bit_length() - 1) // 8
    if number < 0 or not 1 <= size <= 6 or number >> (8 * size) != 1:
        return None
    return number.to_bytes(size + 1)[1:]


def unknown_ids(ids: Iterable[int]) -> list[int]:
    """Those of ``ids`` that are neither of this tokenizer nor of a published one."""
    return [each for each in ids if not 0 <= each < _MOST_PUBLISHED and token_bytes(each) is None]


@dataclass(slots=True, frozen=True, eq=False)
class TokenizedPrompt:
    """A prompt: its tokens (or token ids of another tokenizer) and the bytes that seed its answer.

    It is compared and hashed by identity, whatever its length.
    """

    tokens: Sequence[bytes | int]
    digest: bytes

    @classmethod
    def of_text(cls, text: str) -> TokenizedPrompt:
        return cls(tokenize(text) or [b""], text.encode())

    @classmethod
    def of_ids(cls, ids: Sequence[int]) -> TokenizedPrompt:
        return cls(ids, ",".join(map(str, ids)).encode())


@dataclass(slots=True, frozen=True)
class GeneratedText:
    """The text of a choice, one delta per token, and its finish reason.

    ``stop`` is the stop sequence that ended it. The text ends before the stop sequence, so the deltas of the
    last tokens may be empty. In a call of the function ``tool`` the text is its arguments.
    """

    deltas: list[str]
    finish_reason: str
    stop: str | None = None
    tool: str = ""

    @property
    def text(self) -> str:
        return "".join(self.deltas)


def seed_of(*parts: object, prompt: TokenizedPrompt) -> int:
    """A 64-bit seed that depends on every part and on the prompt."""
    data = repr(parts).encode()
    return int.from_bytes(hashlib.blake2b(data + prompt.digest, digest_size=8).digest())


def natural_length(seed: int) -> int:
    """The length of an answer without a limit: 16 to 256 tokens."""
    return 16 + seed % 241


def words(seed: int, count: int) -> str:
    """``count`` words."""
    return " ".join(_WORDS[mix(seed + index) % len(_WORDS)] for index in range(count))


def call(name: str, arguments: str, limit: int) -> GeneratedText:
    """A call of ``name`` with ``arguments`` in ASCII, of at most ``limit`` tokens."""
    deltas = [token.decode() for token in tokenize(arguments)]
    return GeneratedText(deltas[:limit], "stop" if len(deltas) <= limit else "length", tool=name)


def write(seed: int, tokens: int, *, ends: bool, stops: Sequence[str] = ()) -> GeneratedText:
    """An answer of ``tokens`` tokens, or fewer when one of ``stops`` appears in it.

    With ``ends`` the finish reason is ``stop``, otherwise ``length``.
    """
    deltas = [" " + _WORDS[mix(seed + index) % len(_WORDS)] for index in range(tokens)]
    deltas[0] = deltas[0][1:]
    reason = "stop" if ends else "length"
    text = "".join(deltas)
    found = min(((at, stop) for stop in stops if stop and (at := text.find(stop)) >= 0), default=None)
    if found is None:
        return GeneratedText(deltas, reason)
    at, stop = found
    kept, position = [], 0
    for delta in deltas:
        if position >= at + len(stop):
            break
        kept.append(delta[: max(0, at - position)])
        position += len(delta)
    return GeneratedText(kept, "stop", stop)


def mix(value: int) -> int:
    """A well-mixed 64-bit number (splitmix64)."""
    value = (value * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
