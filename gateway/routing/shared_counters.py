"""Counts that the gateway workers of one host share: a mapped file with a row for each.

A row has one writer and only whole aligned words are written, so there is no lock. Two counts of one replica
may be read at two moments, which the next read corrects; published prefixes carry a check word. One word has
many writers: it differs after each new key of a replica or model, for others to look for it at once.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

BEAT_EVERY_S = 0.25
DEAD_AFTER_S = 3.0
# As many workers as a deployment may configure; unused rows take no memory.
ROWS = 256
RING_ENTRIES = 4096

_MASK = (1 << 64) - 1
# Words of a row's header; a header is a cache line, and all headers lie together before all tables.
_LAYOUT, _PID, _INCARNATION, _BEAT, _CLAIMS, _SEQUENCE, _CONNECTIONS = range(7)
# In the first header only: the row with the last new key of a replica or model, and how many it has.
_LAST_CLAIM = 7
_HEADER = 8
_ENTRY = struct.Struct("4Q")
_ENTRY_WORDS = 4
# A key is within this many slots of its own, or nowhere.
_WINDOW = 16


class _Table(NamedTuple):
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


_LINKS = _Table(at=0, slots=1024, counts=3)
_TENANTS = _Table(at=_LINKS.at + _LINKS.words, slots=4096, counts=1)
_ACCOUNTS = _Table(at=_TENANTS.at + _TENANTS.words, slots=4096, counts=3)
_RING = _ACCOUNTS.at + _ACCOUNTS.words
_ROW = _RING + RING_ENTRIES * _ENTRY_WORDS
_BYTES = 8 * ROWS * (_HEADER + _ROW)
# Another version, or other sizes, must not be read as this one.
_THIS_LAYOUT = 3 << 56 | _LINKS.slots << 40 | _TENANTS.slots << 20 | RING_ENTRIES

_HEADS = [(row, row * _HEADER) for row in range(ROWS)]

PublishedPrefixes = tuple[int, int, list[int]]
# The upper half of a word that stands in the place of a model's key; the lower half are seconds.
LOSS = 0x6C6F7374


class SharedCounts:
    """What a worker reports to the other workers of its host, and reads of them. Keys are 64-bit hashes.

    This base class is that of a worker without others. ``alone``: no other worker lived at the last beat.
    """

    alone: bool = True

    def begin(self, key: int, tokens: int) -> None:
        """A request with ``tokens`` uncached prompt tokens goes to the replica with ``key``."""

    def first_token(self, key: int, tokens: int) -> None:
        """The prefill of such a request is over: its first token came, or it ended without one."""

    def end(self, key: int) -> None:
        """Such a request ended."""

    def others(self, key: int) -> tuple[int, int, int]:
        """What the others have there: requests in flight, pending prompt tokens, requests ever begun.

        The last may decrease: a worker that starts anew begins at 0.
        """
        return 0, 0, 0

    def publish(self, model_key: int, replica_key: int, hashes: Sequence[int]) -> None:
        """Report that prompts with these prefixes were sent to a replica of a model."""

    def publish_loss(self, replica_key: int, fingerprint: int, at: float) -> None:
        """Report that a request was lost there; others read it as a prefix of a model :data:`LOSS`."""
        self.publish(LOSS << 32 | int(at), replica_key, (fingerprint,))

    def published_by_others(self) -> list[PublishedPrefixes]:
        """What the others published since the last call: (model key, replica key, hashes)."""
        return []

    def served(self, tenant_key: int, tokens: int) -> None:
        """A tenant was served so many virtual tokens; a correction may be negative."""

    def served_by_others(self, tenant_key: int) -> int:
        """Virtual tokens that the others served a tenant since they started; it may decrease."""
        return 0

    def report_connections(self, count: int) -> None:
        """Report that this worker accepts connections and has ``count`` of them; -1: it accepts none."""

    def connections_of_others(self) -> list[tuple[int, int]]:
        """The others that accept connections: a key of each, and how many connections it has."""
        return []

    def set_tenant(self, tenant_key: int, in_flight: int, prompt_tokens: int, output_tokens: int) -> None:
        """A tenant has these requests in flight, and was served these tokens since this worker started."""

    def tenant_of_others(self, tenant_key: int) -> tuple[int, int, int]:
        """The sums of what the others set by :meth:`set_tenant`; they may decrease."""
        return 0, 0, 0

    def beat(self) -> None:
        """Report that this worker lives, and look which others do; every :data:`BEAT_EVERY_S`."""

    def refresh(self) -> None:
        """Find replicas and models that others count for the first time, which else the next beat does.

        Before it, a worker that chooses a replica would see neither their requests there nor those that wait.
        """

    def close(self) -> None:
        """Leave: the others count nothing of this worker any more."""


LOCAL = SharedCounts()


class SharedRows(SharedCounts):
    """One worker's row, and its view of the other rows. Raises :class:`OSError` if no row is free.

    ``row`` is the row to take, or the next free one while a draining worker holds it. ``clock`` is the host's
    monotonic clock, in seconds.
    """

    def __init__(self, path: Path, row: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self.row = self._take(row)
            if os.fstat(self._file).st_size < _BYTES:
                os.ftruncate(self._file, _BYTES)
            self._map = mmap.mmap(self._file, _BYTES)
        except BaseException:
            os.close(self._file)
            raise
        # The same words twice: keys and sequence numbers are unsigned, counts may be corrected.
        self._words = memoryview(self._map).cast("Q")
        self._counts = memoryview(self._map).cast("q")
        self._head, self._base = self.row * _HEADER, _tables(self.row)
        self._mine: dict[int, int] = {}
        self._tenants: dict[int, int] = {}
        self._peers: tuple[tuple[int, int, int], ...] = ()
        self.alone = True
        self._last_claim = 0
        self._rings: list[int] = []
        self._accepting: list[int] = []
        self._read_upto: list[int] = []
        self._read_of: dict[int, int] = {}
        self._places: dict[int, tuple[int, ...]] = {}
        self._tenant_places: dict[int, tuple[int, ...]] = {}
        self._accounts: dict[int, int] = {}
        self._account_places: dict[int, tuple[int, ...]] = {}
        self._clear()
        self.beat()

    def begin(self, key: int, tokens: int) -> None:
        at = self._mine.get(key) or self._claim(_LINKS, self._mine, key)
        if at > 0:
            counts = self._counts
            counts[at + 1] += 1
            counts[at + 2] += tokens
            counts[at + 3] += 1

    def first_token(self, key: int, tokens: int) -> None:
        at = self._mine.get(key, -1)
        if at > 0:
            self._counts[at + 2] -= tokens

    def end(self, key: int) -> None:
        at = self._mine.get(key, -1)
        if at > 0:
            self._counts[at + 1] -= 1

    def others(self, key: int) -> tuple[int, int, int]:
        return self._sums(_LINKS, self._places, key)

    def publish(self, model_key: int, replica_key: int, hashes: Sequence[int]) -> None:
        words, head, base = self._words, self._head, self._base
        sequence = words[head + _SEQUENCE]
        for prefix in hashes:
            check = sequence ^ model_key ^ replica_key ^ prefix
            at = base + _RING + sequence % RING_ENTRIES * _ENTRY_WORDS
            _ENTRY.pack_into(self._map, at * 8, check, model_key, replica_key, prefix)
            sequence += 1
        words[head + _SEQUENCE] = sequence

    def published_by_others(self) -> list[PublishedPrefixes]:
        words = self._words
        if [words[at] for at in self._rings] == self._read_upto:
            return []
        found: list[PublishedPrefixes] = []
        for i, at in enumerate(self._rings):
            upto, ring = words[at], _tables(at // _HEADER) + _RING
            for sequence in range(max(self._read_upto[i], upto - RING_ENTRIES), upto):
                entry = ring + sequence % RING_ENTRIES * _ENTRY_WORDS
                check, model, replica, prefix = _ENTRY.unpack_from(self._map, entry * 8)
                # Written while it was read, or overwritten: skipped, since it is only a hint.
                if check != sequence ^ model ^ replica ^ prefix:
                    continue
                if found and found[-1][0] == model and found[-1][1] == replica:
                    found[-1][2].append(prefix)
                else:
                    found.append((model, replica, [prefix]))
            self._read_upto[i] = upto
        return found

    def served(self, tenant_key: int, tokens: int) -> None:
        at = self._tenants.get(tenant_key) or self._claim(_TENANTS, self._tenants, tenant_key)
        if at > 0:
            self._counts[at + 1] += tokens

    def served_by_others(self, tenant_key: int) -> int:
        places = self._tenant_places.get(tenant_key)
        if places is None:
            places = self._find(_TENANTS, self._tenant_places, tenant_key)
        words, counts = self._words, self._counts
        return sum([counts[at + 1] for at in places if words[at] == tenant_key])

    def report_connections(self, count: int) -> None:
        self._words[self._head + _CONNECTIONS] = count + 1

    def connections_of_others(self) -> list[tuple[int, int]]:
        words = self._words
        return [(at, words[at] - 1) for at in self._accepting if words[at]]

    def set_tenant(self, tenant_key: int, in_flight: int, prompt_tokens: int, output_tokens: int) -> None:
        at = self._accounts.get(tenant_key) or self._claim(_ACCOUNTS, self._accounts, tenant_key)
        if at > 0:
            counts = self._counts
            counts[at + 1], counts[at + 2], counts[at + 3] = in_flight, prompt_tokens, output_tokens

    def tenant_of_others(self, tenant_key: int) -> tuple[int, int, int]:
        return self._sums(_ACCOUNTS, self._account_places, tenant_key)

    def beat(self) -> None:
        self._words[self._head + _BEAT] = int(self._clock() * 1e9)
        self._follow()

    def refresh(self) -> None:
        if self._words[_LAST_CLAIM] != self._last_claim:
            self._follow()

    def _follow(self) -> None:
        """Look which other workers live, and forget where they count what if their keys changed."""
        self._last_claim = self._words[_LAST_CLAIM]
        peers = tuple(self._look(int(self._clock() * 1e9)))
        if peers != self._peers:
            self._read_of.update(zip(self._rings, self._read_upto, strict=True))
            self._peers = peers
            self.alone = not peers
            self._rings = [row * _HEADER + _SEQUENCE for row, _, _ in peers]
            self._accepting = [row * _HEADER + _CONNECTIONS for row, _, _ in peers]
            # From a worker that is new here, all that its ring still holds.
            self._read_upto = [self._read_of.get(at, 0) for at in self._rings]
            self._places.clear()
            self._tenant_places.clear()
            self._account_places.clear()

    def close(self) -> None:
        self._words[self._head + _BEAT] = 0
        self._words.release()
        self._counts.release()
        self._map.close()
        os.close(self._file)

    def _take(self, wanted: int) -> int:
        """Lock a row, the wanted one or the next: the lock ends with this process, however it ends."""
        for i in range(ROWS):
            row = (wanted + i) % ROWS
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, row)
            except BlockingIOError:
                continue
            return row
        raise OSError(f"{ROWS} workers of this host already share their counts")

    def _clear(self) -> None:
        """Clear the counts of the row's last worker. Its published prefixes stay, and are numbered on."""
        words, head, begin = self._words, self._head, self._base * 8
        words[head + _BEAT] = 0
        if words[head + _LAYOUT] != _THIS_LAYOUT:
            words[head + _SEQUENCE] = 0
        self._map[begin : begin + _RING * 8] = bytes(_RING * 8)
        words[head + _LAYOUT] = _THIS_LAYOUT
        words[head + _PID] = os.getpid()
        words[head + _INCARNATION] = (words[head + _INCARNATION] + 1) & _MASK
        words[head + _CLAIMS] = 0
        words[head + _CONNECTIONS] = 0

    def _look(self, now: int) -> list[tuple[int, int, int]]:
        """The rows of other living workers, with what changes when their keys do."""
        words, oldest = self._words, now - int(DEAD_AFTER_S * 1e9)
        # A beat in the future was before this machine started.
        return [
            (row, words[head + _INCARNATION], words[head + _CLAIMS])
            for row, head in _HEADS
            if words[head + _BEAT]
            and oldest <= words[head + _BEAT] <= now
            and head != self._head
            and words[head + _LAYOUT] == _THIS_LAYOUT
        ]

    def _sums(self, table: _Table, known: dict[int, tuple[int, ...]], key: int) -> tuple[int, int, int]:
        """The three counts of ``key``, each summed over the live rows."""
        places = known.get(key)
        if places is None:
            places = self._find(table, known, key)
        words, counts = self._words, self._counts
        first = second = third = 0
        for at in places:
            if words[at] == key:  # the slot may be another key's by now: of a lost replica, or a new worker
                first += counts[at + 1]
                second += counts[at + 2]
                third += counts[at + 3]
        return first, second, third

    def _find(self, table: _Table, known: dict[int, tuple[int, ...]], key: int) -> tuple[int, ...]:
        """Where the live rows count ``key``; kept in ``known`` until their keys change."""
        words = self._words
        if len(known) >= table.slots:
            known.clear()
        known[key] = found = tuple(
            at for row, _, _ in self._peers for at in table.window(_tables(row), key) if words[at] == key
        )
        return found

    def _claim(self, table: _Table, known: dict[int, int], key: int) -> int:
        """A slot for ``key`` in this row, -1 when there is none: it is then not counted here."""
        words, counts = self._words, self._counts
        window = table.window(self._base, key)
        at = next((at for at in window if not words[at]), -1)
        if at < 0 and table is _LINKS:
            # Replicas come and go and no slot is given back: take one where nothing runs.
            at = next((at for at in window if not counts[at + 1] and not counts[at + 2]), -1)
            if at > 0:
                del known[words[at]]
                words[at] = 0
        if at > 0:
            for i in range(1, 1 + table.counts):
                counts[at + i] = 0
            words[at] = key
            words[self._head + _CLAIMS] += 1
            if table is _LINKS:  # of tenants the others may hear later
                words[_LAST_CLAIM] = self.row << 32 | words[self._head + _CLAIMS]
        # A key that was left out once stays so: its end must not be counted where its begin was not.
        if at > 0 or len(known) < 2 * table.slots:
            known[key] = at
        return at


def _tables(row: int) -> int:
    """The word at which the tables of ``row`` begin."""
    return ROWS * _HEADER + row * _ROW
