"""Rows of 64-bit words in a mapped file, one writer a row: shared by the processes of one host without locks.

Only whole aligned words are written. A row is locked by its process, however that ends; a header has what
others need to know of it, and tables of keys with counts follow. One word has many writers: it differs after
each new key, for others to look for it at once.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

DEAD_AFTER_S: Final = 3.0
# As many workers as a deployment may configure; unused rows take no memory.
ROWS: Final = 256
# Words of a row's header, which is a cache line; all headers lie together before all tables. From OWN on, two
# are the user's.
_LAYOUT, _PID, _INCARNATION, _BEAT, _CLAIMS, OWN = range(6)
# In the first header only: the row with the last new key, and how many it has.
_LAST_CLAIM: Final = 7
HEADER: Final = 8
# A key is within this many slots of its own, or nowhere.
_WINDOW: Final = 16
_MASK: Final = (1 << 64) - 1


class TableLayout(NamedTuple):
    """Keys with counts: ``slots`` of a key and ``counts`` count words, ``at`` words into a row's tables."""

    at: int
    slots: int
    counts: int

    @property
    def words(self) -> int:
        return self.slots * (1 + self.counts)

    def window(self, base: int, key: int) -> list[int]:
        """The words where ``key`` may stand in the tables at ``base``."""
        wide = 1 + self.counts
        return [base + self.at + (key + i) % self.slots * wide for i in range(_WINDOW)]


class PeerRow(NamedTuple):
    """A row that lives, and what changes when its keys do."""

    row: int
    incarnation: int
    claims: int


class MappedRows:
    """One process's row, and its view of the others. Raises :class:`OSError` if no row is free.

    ``row`` is the row to take, or the next free one of the first :data:`ROWS` while another process holds it;
    rows behind those are taken as they are named. ``size`` are the words of a row's tables; files of another
    ``layout`` are not read. ``clock`` is the host's monotonic clock, in seconds. ``words`` and ``counts`` are
    the same words twice: keys are unsigned, counts may be corrected. ``began_anew``: the row has no tables of
    this layout, which the user clears.
    """

    def __init__(
        self,
        path: Path,
        row: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        layout: int,
        size: int,
        rows: int = ROWS,
    ) -> None:
        self._clock = clock
        self._layout = layout
        self._size = size
        self._rows = rows
        self._heads = [(i, i * HEADER) for i in range(rows)]
        whole = 8 * rows * (HEADER + size)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self.row = self._take(row)
            if os.fstat(self._file).st_size < whole:
                os.ftruncate(self._file, whole)
            self.map = mmap.mmap(self._file, whole)
        except BaseException:
            os.close(self._file)
            raise
        self.words = memoryview(self.map).cast("Q")
        self.counts = memoryview(self.map).cast("q")
        self.head, self.base = self.row * HEADER, self.tables(self.row)
        self._last_claim = 0
        words, head = self.words, self.head
        words[head + _BEAT] = 0
        self.began_anew = words[head + _LAYOUT] != layout

    def begin(self) -> None:
        """The user has cleared what it must not take over: others may read the row from now on."""
        words, head = self.words, self.head
        words[head + _LAYOUT] = self._layout
        words[head + _PID] = os.getpid()
        words[head + _INCARNATION] = (words[head + _INCARNATION] + 1) & _MASK
        words[head + _CLAIMS] = 0

    def tables(self, row: int) -> int:
        """The word at which the tables of ``row`` begin."""
        return self._rows * HEADER + row * self._size

    def beat(self) -> None:
        """Report that this process lives."""
        self.words[self.head + _BEAT] = int(self._clock() * 1e9)

    @property
    def has_news(self) -> bool:
        """Whether a row has a new key since :meth:`peers` was called last."""
        return bool(self.words[_LAST_CLAIM] != self._last_claim)

    def peers(self) -> tuple[PeerRow, ...]:
        """The rows of other living processes."""
        words = self.words
        self._last_claim = words[_LAST_CLAIM]
        now = int(self._clock() * 1e9)
        oldest = now - int(DEAD_AFTER_S * 1e9)
        # A beat in the future was before this machine started.
        return tuple(
            [
                PeerRow(row, words[head + _INCARNATION], words[head + _CLAIMS])
                for row, head in self._heads
                if words[head + _BEAT]
                and oldest <= words[head + _BEAT] <= now
                and head != self.head
                and words[head + _LAYOUT] == self._layout
            ]
        )

    def written(self) -> list[int]:
        """The rows with tables of this layout, of living processes and of dead ones."""
        words = self.words
        return [row for row, head in self._heads if words[head + _LAYOUT] == self._layout]

    def keys_version(self, row: int) -> tuple[int, int]:
        """What changes when the keys of ``row`` do."""
        head = row * HEADER
        return self.words[head + _INCARNATION], self.words[head + _CLAIMS]

    def find(self, table: TableLayout, row: int, key: int) -> int:
        """Where ``row`` counts ``key``; -1 if it does not."""
        words = self.words
        for at in table.window(self.tables(row), key):
            if words[at] == key:
                return at
        return -1

    def free(self, table: TableLayout, key: int) -> int:
        """A free slot for ``key`` in this row, -1 when there is none."""
        words = self.words
        for at in table.window(self.base, key):
            if not words[at]:
                return at
        return -1

    def claim(self, table: TableLayout, at: int, key: int, *, announce: bool) -> None:
        """Count ``key`` in the slot ``at`` from now on; others look for it at once if it is announced."""
        words, counts = self.words, self.counts
        words[at] = 0
        for i in range(1, 1 + table.counts):
            counts[at + i] = 0
        words[at] = key
        words[self.head + _CLAIMS] = (words[self.head + _CLAIMS] + 1) & _MASK
        if announce:
            words[_LAST_CLAIM] = self.row << 32 | words[self.head + _CLAIMS] & 0xFFFF_FFFF

    def close(self) -> None:
        """Leave: the others count nothing of this process any more."""
        self.words[self.head + _BEAT] = 0
        self.words.release()
        self.counts.release()
        self.map.close()
        os.close(self._file)

    def _take(self, wanted: int) -> int:
        """Lock a row, the wanted one or the next: the lock ends with this process, however it ends."""
        for i in range(ROWS if wanted < ROWS else 1):
            row = (wanted + i) % ROWS if wanted < ROWS else wanted
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, row)
            except BlockingIOError:
                continue
            return row
        raise OSError(f"{ROWS} workers of this host already share their counts")
