"""A capture: the trace that a gateway records and the simulator reads. Lengths, times and hashes, never text.

The first line is a :class:`CaptureHeader`; each line after it is a :class:`CaptureLine` or, in a gateway's
stream, a :class:`DroppedRows`. All are JSON.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

# Tokens of a block of prompt, as in Mooncake's traces.
BLOCK_TOKENS: Final = 512
# No context is longer: such a number is in the wrong field.
MAX_TOKENS = 10_000_000

Tokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
# msgspec bounds integers by 64 bits with a sign.
Hash = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class CaptureHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The version of the format, and the tokens of a block."""

    tidegate: Literal["capture"]
    version: Literal[1]
    block_tokens: Literal[512]


HEADER = CaptureHeader(tidegate="capture", version=1, block_tokens=BLOCK_TOKENS)


class CaptureLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One request; ``at`` is its arrival, in seconds since the capture (or any other instant) began.

    ``blocks`` are hashes of the prompt in blocks of about :data:`BLOCK_TOKENS` tokens, each of which stands
    for all tokens before it too. ``session`` is the same in all turns of a conversation, 0 for none. A
    gateway keys both hashes by a secret that is deleted when the capture ends.
    """

    at: Annotated[float, Meta(ge=0)]
    input_tokens: Tokens
    output_tokens: Tokens
    model: str = ""
    adapter: str = ""
    tenant: str = ""
    session: Annotated[int, Meta(ge=0)] = 0
    blocks: tuple[Hash, ...] = ()


class DroppedRows(msgspec.Struct, frozen=True):
    """How many requests could not be recorded since the capture began; also sent where there are none."""

    lost: int
