"""Read the tensors of a safetensors file: names, positions, and whether all numbers are finite.

The format: eight bytes of length, a JSON header, then the tensors without gaps. Only the header and one block
are held in memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from policy.config.convert import prepare_decoders
from policy.errors import AdapterRefused

_invalid = partial(AdapterRefused, "not_an_adapter")
# Limit of the header: larger than one with thousands of tensors.
MAX_HEADER_BYTES = 16 * 1024 * 1024
BLOCK_BYTES = 4 * 1024 * 1024
# Bits of one number, by dtype.
BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
# By floating-point dtype: the unsigned integer of equal size, and its exponent bits, all of which are set in
# NaN and infinity.
_EXPONENTS = {"F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80), "F32": ("<u4", 0x7F80_0000)}


class Tensor(NamedTuple):
    """One tensor: its ``dtype`` as the format spells it, and where its bytes ``begin`` and ``end``."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


_Extent = Annotated[int, Meta(ge=0, le=2**62)]


class _Entry(msgspec.Struct):
    dtype: str
    # Bounded, so that the product of untrusted sizes stays cheap to compute.
    shape: Annotated[list[_Extent], Meta(max_length=16)]
    data_offsets: tuple[_Extent, _Extent]


# Adapters are read in threads.
prepare_decoders(_Entry)


def tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of the file by name, in the order of their bytes.

    Raises :class:`policy.errors.AdapterRefused`: ``truncated`` if it ends too early, otherwise
    ``not_an_adapter`` for an invalid file.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        head = file.read(8)
        length = int.from_bytes(head, "little")
        if len(head) == 8 and length > MAX_HEADER_BYTES:
            raise _invalid(f"{path.name} is no safetensors file: a header of {length} bytes")
        if len(head) < 8 or length > size - 8:
            raise AdapterRefused("truncated", f"{path.name} has {size} bytes and ends within its header")
        entries = _header(path.name, file.read(length))
    return _placed(path.name, entries, 8 + length, size)


def _header(file: str, text: bytes) -> dict[str, _Entry]:
    try:
        header = json.loads(text.decode(), object_pairs_hook=_unique)
        if not isinstance(header, dict):
            raise ValueError("it is no JSON object")
        msgspec.convert(header.pop("__metadata__", {}), dict[str, str])
        return {name: msgspec.convert(raw, _Entry) for name, raw in header.items()}
    except (ValueError, RecursionError) as error:
        raise _invalid(f"{file} has no readable header: {error}"[:400]) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse duplicate keys and lone surrogates, which readers treat differently."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        name.encode()
        if name in found:
            raise ValueError(f"{name:.200} occurs twice")
        found[name] = value
    return found


def _placed(file: str, entries: Mapping[str, _Entry], start: int, size: int) -> dict[str, Tensor]:
    """The tensors of ``entries``, which must follow each other without gaps to the end of the file."""
    found: dict[str, Tensor] = {}
    at = start
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end = (start + offset for offset in entry.data_offsets)
        if entry.dtype not in BITS:
            raise _invalid(f"{name:.200} in {file} has the unknown type {entry.dtype!r:.30}")
        if begin != at or 8 * (end - begin) != prod(entry.shape) * BITS[entry.dtype]:
            raise _invalid(f"{name:.200} in {file} does not lie where its shape says")
        found[name] = Tensor(entry.dtype, tuple(entry.shape), begin, end)
        at = end
    if at > size:
        raise AdapterRefused("truncated", f"{file} has {size} bytes, its header says {at}")
    if at < size:
        raise _invalid(f"{file} has {size - at} bytes that belong to no tensor")
    return found


def is_finite(file: BinaryIO, tensor: Tensor) -> bool:
    """Whether no number of ``tensor``, of type F16, BF16 or F32, is NaN or infinite.

    Raises :class:`policy.errors.AdapterRefused` if ``file`` became shorter since its header was read.
    """
    kind, exponent = _EXPONENTS[tensor.dtype]
    mask = np.array(exponent, dtype=kind)
    file.seek(tensor.begin)
    left = tensor.end - tensor.begin
    while left:
        block = file.read(min(left, BLOCK_BYTES))
        if len(block) < min(left, BLOCK_BYTES):
            raise AdapterRefused("truncated", "the weights became shorter while they were read")
        left -= len(block)
        if bool(((np.frombuffer(block, dtype=kind) & mask) == mask).any()):
            return False
    return True
