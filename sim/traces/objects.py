"""Lines of JSON that are objects of one kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Generic, TypeVar

import msgspec
from msgspec import Meta

from sim.trace import BLOCK_TOKENS
from sim.traces.lines import Lines
from sim.traces.table import MAX_TOKENS

T = TypeVar("T")

Tokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
Hash = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class Objects(Generic[T]):
    """Each line as a ``kind``; raises :class:`policy.errors.TraceError` for one that is none."""

    def __init__(self, lines: Lines, kind: type[T], first: str | None = None) -> None:
        self.lines = lines
        self._decoder = msgspec.json.Decoder(kind)
        self._first = first

    def __iter__(self) -> Iterator[T]:
        if self._first is not None:
            yield self.decoded(self._first)
        for line in self.lines:
            yield self.decoded(line)

    def decoded(self, line: str) -> T:
        """``line``, which was read last, as an object."""
        try:
            return self._decoder.decode(line)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise self.lines.refused(line, f"an object of this format: {error}") from None

    def blocks(self, hashes: tuple[int, ...], input_tokens: int) -> tuple[int, ...]:
        """``hashes``, if that many blocks of :data:`sim.trace.BLOCK_TOKENS` can be in ``input_tokens``."""
        if len(hashes) > (most := -(-input_tokens // BLOCK_TOKENS)):
            expected = f"at most {most}, one for each {BLOCK_TOKENS} of {input_tokens} tokens"
            raise self.lines.refused(f"{len(hashes)} hashes", expected)
        return hashes
