"""Tar streams: a directory of files sent from one node to another."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from policy.errors import AdapterRefused

BLOCK_BYTES = 1024 * 1024
_RECORD = 512


def pack(directory: Path, names: Iterable[str]) -> Iterator[bytes]:
    """The files ``names`` of ``directory``; raises ``OSError``."""
    for name in sorted(names):
        with (directory / name).open("rb") as file:
            header = tarfile.TarInfo(name)
            header.size = left = os.fstat(file.fileno()).st_size
            yield header.tobuf(tarfile.GNU_FORMAT)
            while block := file.read(min(left, BLOCK_BYTES)):
                left -= len(block)
                yield block
        yield bytes(-header.size % _RECORD)
    yield bytes(2 * _RECORD)


def unpack(chunks: Iterable[bytes], directory: Path, names: Iterable[str], max_bytes: int) -> None:
    """Write the files of a stream into ``directory``: regular files called ``names``, each once.

    Raises :class:`policy.errors.AdapterRefused`: ``archive`` for anything else in the stream, ``too_large``
    for more than ``max_bytes`` of files, ``truncated`` for a stream that ends too early.
    """
    stream = _Stream(chunks)
    wanted, left = set(names), max_bytes
    while (record := stream.exactly(_RECORD)) != bytes(_RECORD):
        try:
            header = tarfile.TarInfo.frombuf(record, "utf-8", "strict")
        except (tarfile.TarError, UnicodeDecodeError) as error:
            raise AdapterRefused("archive", f"the stream is no tar: {error}") from None
        if header.name not in wanted or header.type != tarfile.REGTYPE or header.size < 0:
            raise AdapterRefused("archive", f"the stream holds {header.name!r:.100}, which was not asked for")
        if header.size > left:
            raise AdapterRefused("too_large", f"the stream has more than {max_bytes} bytes")
        wanted.remove(header.name)
        left -= header.size
        with (directory / header.name).open("xb") as file:
            for block in stream.blocks(header.size):
                file.write(block)
        stream.exactly(-header.size % _RECORD)


class _Stream:
    """Reads chunks of any size as blocks of other sizes."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._rest = b""

    def blocks(self, size: int) -> Iterator[bytes]:
        """The next ``size`` bytes as they come."""
        while size:
            if not self._rest:
                self._rest = next(self._chunks, b"")
                if not self._rest:
                    raise AdapterRefused("truncated", f"the stream ends {size} bytes too early")
            block, self._rest = self._rest[:size], self._rest[size:]
            size -= len(block)
            yield block

    def exactly(self, size: int) -> bytes:
        return b"".join(self.blocks(size))
