"""Counts that the gateway workers of one host share: a mapped file with a row for each.

A row has one writer, so there is no lock (:mod:`gateway.routing.mapped_rows`). Two counts of one replica may
be read at two moments, which the next read corrects; published prefixes carry a check word.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from gateway.routing.mapped_rows import HEADER, OWN, MappedRows, PeerRow, TableLayout

BEAT_EVERY_S: Final = 0.25
RING_ENTRIES: Final = 4096
# Entries of others that one request reads, at most: 0.3 ms. With many workers as many as they add meanwhile.
READ_AT_ONCE: Final = 256
READ_OF_EACH: Final = 16

_SEQUENCE, _CONNECTIONS = OWN, OWN + 1
_ENTRY: Final = struct.Struct("4Q")
_ENTRY_WORDS: Final = 4

_LINKS = TableLayout(at=0, slots=1024, counts=3)
_TENANTS = TableLayout(at=_LINKS.at + _LINKS.words, slots=4096, counts=1)
_ACCOUNTS = TableLayout(at=_TENANTS.at + _TENANTS.words, slots=4096, counts=3)
_RING = _ACCOUNTS.at + _ACCOUNTS.words
_ROW: Final = _RING + RING_ENTRIES * _ENTRY_WORDS
# Another version, or other sizes, must not be read as this one.
_THIS_LAYOUT = 3 << 56 | _LINKS.slots << 40 | _TENANTS.slots << 20 | RING_ENTRIES

PublishedPrefixes = tuple[int, int, list[int]]
# The upper half of a word that stands in the place of a model's key; the lower half are seconds, or tokens.
LOSS: Final = 0x6C6F7374
HELD: Final = 0x68656C64
EVICTED: Final = 0x65766963


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

    def publish_cached(self, replica_key: int, prefix: int, tokens: int, *, held: bool) -> None:
        """Report that a server holds a prefix of so many tokens, or no more.

        Others read it as a prefix of a model :data:`HELD` or :data:`EVICTED`.
        """
        self.publish((HELD if held else EVICTED) << 32 | tokens, replica_key, (prefix,))

    def published_by_others(self) -> list[PublishedPrefixes]:
        """What the others published since the last call: (model key, replica key, hashes).

        The next call goes on where it is more than a request has time for.
        """
        return []

    def served(self, tenant_key: int, tokens: int) -> None:
        """Count virtual tokens served to a tenant; a correction may be negative."""

    def served_by_others(self, tenant_key: int) -> int:
        """Virtual tokens that the others served a tenant since they started; it may decrease."""
        return 0

    def report_connections(self, count: int) -> None:
        """Report that this worker accepts connections and has ``count`` of them; -1: it accepts none."""

    def connections_of_others(self) -> list[tuple[int, int]]:
        """The others that accept connections: a key of each, and how many connections it has."""
        return []

    def set_tenant(self, tenant_key: int, in_flight: int, prompt_tokens: int, output_tokens: int) -> None:
        """A tenant has these requests in flight, and was served these tokens since this worker started.

        One without any takes no row, if it had none before.
        """

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
        self._rows = rows = MappedRows(path, row, clock, layout=_THIS_LAYOUT, size=_ROW)
        self.row = rows.row
        self._map, self._words, self._counts = rows.map, rows.words, rows.counts
        self._head, self._base = rows.head, rows.base
        self._mine: dict[int, int] = {}
        self._tenants: dict[int, int] = {}
        self._peers: tuple[PeerRow, ...] = ()
        self.alone = True
        self._rings: list[int] = []
        self._accepting: list[int] = []
        self._read_upto: list[int] = []
        # The ring that was read last.
        self._ring = 0
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
        rings = len(self._rings)
        left = max(READ_AT_ONCE, READ_OF_EACH * rings)
        for _ in range(rings):
            i = self._ring = (self._ring + 1) % rings
            at = self._rings[i]
            written, ring = words[at], self._rows.tables(at // HEADER) + _RING
            # A worker that began anew numbers its entries from 0.
            since = min(max(self._read_upto[i], written - RING_ENTRIES), written)
            upto = min(written, since + left)
            for sequence in range(since, upto):
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
            left -= upto - since
            if not left:
                break
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
        at = self._accounts.get(tenant_key, 0)
        if not at and (in_flight or prompt_tokens or output_tokens):
            at = self._claim(_ACCOUNTS, self._accounts, tenant_key)
        if at > 0:
            counts = self._counts
            counts[at + 1], counts[at + 2], counts[at + 3] = in_flight, prompt_tokens, output_tokens

    def tenant_of_others(self, tenant_key: int) -> tuple[int, int, int]:
        return self._sums(_ACCOUNTS, self._account_places, tenant_key)

    def beat(self) -> None:
        self._rows.beat()
        self._follow()

    def refresh(self) -> None:
        if self._rows.has_news:
            self._follow()

    def _follow(self) -> None:
        """Look which other workers live, and forget where they count what if their keys changed."""
        peers = self._rows.peers()
        if peers != self._peers:
            self._read_of.update(zip(self._rings, self._read_upto, strict=True))
            self._peers = peers
            self.alone = not peers
            self._rings = [peer.row * HEADER + _SEQUENCE for peer in peers]
            self._accepting = [peer.row * HEADER + _CONNECTIONS for peer in peers]
            # From a worker that is new here, all that its ring still holds.
            self._read_upto = [self._read_of.get(at, 0) for at in self._rings]
            self._places.clear()
            self._tenant_places.clear()
            self._account_places.clear()

    def close(self) -> None:
        self._rows.close()

    def _clear(self) -> None:
        """Clear the counts of the row's last worker. Its published prefixes stay, and are numbered on."""
        words, head, begin = self._words, self._head, self._base * 8
        if self._rows.began_anew:
            words[head + _SEQUENCE] = 0
        self._map[begin : begin + _RING * 8] = bytes(_RING * 8)
        self._rows.begin()
        words[head + _CONNECTIONS] = 0

    def _sums(self, table: TableLayout, known: dict[int, tuple[int, ...]], key: int) -> tuple[int, int, int]:
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

    def _find(self, table: TableLayout, known: dict[int, tuple[int, ...]], key: int) -> tuple[int, ...]:
        """Where the live rows count ``key``; kept in ``known`` until their keys change."""
        if len(known) >= table.slots:
            known.clear()
        places = [self._rows.find(table, peer.row, key) for peer in self._peers]
        known[key] = found = tuple([at for at in places if at >= 0])
        return found

    def _claim(self, table: TableLayout, known: dict[int, int], key: int) -> int:
        """A slot for ``key`` in this row, -1 when there is none: it is then not counted here."""
        words, counts, rows = self._words, self._counts, self._rows
        at = rows.free(table, key)
        if at < 0 and table is _LINKS:
            # Replicas come and go and no slot is given back: take one where nothing runs.
            window = table.window(self._base, key)
            at = next((at for at in window if not counts[at + 1] and not counts[at + 2]), -1)
            if at > 0:
                del known[words[at]]
        if at > 0:  # of tenants the others may hear later
            rows.claim(table, at, key, announce=table is _LINKS)
        # A key that was left out once stays so: its end must not be counted where its begin was not.
        if at > 0 or len(known) < 2 * table.slots:
            known[key] = at
        return at
