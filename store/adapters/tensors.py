"""The tensors of a safetensors file: which there are, where they lie, and whether their numbers are any.

Read as data by the format's own description: eight bytes of length, a JSON header, then the tensors without
gaps. Nothing in it is run, and no more of it is held in memory than one block.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from policy.errors import AdapterRefused

# As large as an honest header of thousands of tensors is not.
MAX_HEADER_BYTES = 16 * 1024 * 1024
BLOCK_BYTES = 4 * 1024 * 1024
# Bytes of one number.
SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip
# Of each kind of floating-point number, its unsigned integer and the bits that are all set in NaN and infinity.
_EXPONENTS = {
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
    "F32": ("<u4", 0x7F80_0000),
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
}


class Tensor(NamedTuple):
    """One tensor: its ``dtype`` as the format spells it, and its bytes from ``begin`` to ``end`` in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of the file by name.

    Raises :class:`policy.errors.AdapterRefused`: ``truncated`` for one that ends too early, else
    ``not_an_adapter`` for one that is no such file.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        head = file.read(8)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length > size - 8:
            raise AdapterRefused("truncated", f"{path.name} ends within its header")
        if length > MAX_HEADER_BYTES:
            raise AdapterRefused("not_an_adapter", f"{path.name} has a header of {length} bytes")
        try:
            header = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
            header.pop("__metadata__", None)
            entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in header.items()}
        except (ValueError, RecursionError) as error:
            raise AdapterRefused("not_an_adapter", f"{path.name} has no readable header: {error}") from None
    return _placed(path.name, entries, 8 + length, size)


def _placed(file: str, entries: dict[str, _Entry], start: int, size: int) -> dict[str, Tensor]:
    """``entries`` at their places, which must follow each other without gaps to the end of the file."""
    found: dict[str, Tensor] = {}
    at = start
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end = (start + offset for offset in entry.data_offsets)
        if entry.dtype not in SIZES or any(extent < 0 for extent in entry.shape):
            raise AdapterRefused("not_an_adapter", f"{name[:200]} in {file} has no known type or shape")
        if begin != at or end - begin != prod(entry.shape) * SIZES[entry.dtype]:
            raise AdapterRefused(
                "not_an_adapter", f"{name[:200]} in {file} does not lie where its shape says"
            )
        found[name] = Tensor(entry.dtype, tuple(entry.shape), begin, end)
        at = end
    if at > size:
        raise AdapterRefused("truncated", f"{file} has {size} bytes, its header says {at}")
    if at < size:
        raise AdapterRefused("not_an_adapter", f"{file} has {size - at} bytes that belong to no tensor")
    return found


def is_finite(path: Path, tensor: Tensor) -> bool:
    """Whether no number of ``tensor`` is NaN or infinite; those of integers never are."""
    if tensor.dtype not in _EXPONENTS:
        return True
    kind, exponent = _EXPONENTS[tensor.dtype]
    mask = np.array(exponent, dtype=kind)
    with path.open("rb", buffering=0) as file:
        file.seek(tensor.begin)
        left = tensor.end - tensor.begin
        while left:
            block = file.read(min(left, BLOCK_BYTES))
            if not block:
                raise AdapterRefused("truncated", f"{path.name} became shorter while it was read")
            left -= len(block)
            if len(block) % mask.itemsize:  # a read that stopped within a number
                rest = file.read(mask.itemsize - len(block) % mask.itemsize)
                block, left = block + rest, left - len(rest)
            numbers = np.frombuffer(block, dtype=kind)
            if bool(((numbers & mask) == mask).any()):
                return False
    return True
