"""Counts of what tenants and keys have used of their limits, in a file that the host's processes map.

A row's counts only grow, and outlive its process: what a killed worker had reserved stays used, and a worker
that starts knows the levels that others, or its predecessor, saw last. The last row is the accounting
process's, which writes shares of limits and spent budgets there.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Final

from gateway.routing.mapped_rows import HEADER, OWN, ROWS, MappedRows, TableLayout
from policy.hashing import hash_name
from store.os_process import boot_key

# The words of a slot: its key, then the counts of :class:`LimitSlot` in their order.
_WORDS: Final = struct.Struct("14q")
_COUNTS: Final = struct.Struct("13q")
_RUNNING: Final = 5
_SPENT: Final = 6
_OPEN: Final = 7
_ASKED: Final = 8
_ASKED_AT: Final = 9
_REQUESTS_FULL_AT: Final = 10
_TOKENS_FULL_AT: Final = 11
_SPENT_BEFORE: Final = 12
_PERIOD_BEGIN: Final = 13
# In the accounting process's row: the lease, and what the host's counts of spent money lack of that of the
# period, whose end follows in Unix seconds.
_LEASE: Final = 1
_SPENT_ELSEWHERE: Final = 2
_PERIOD_END: Final = 3
# In a worker's header: the revision of tenants and keys that is in force there.
_ACCESS = OWN
# In that of the accounting process: how many hosts there are, and until when the database is known to answer.
_HOSTS, _ANSWERS_UNTIL = OWN, OWN + 1

_SLOTS = TableLayout(at=0, slots=16_384, counts=13)
ACCOUNTING = ROWS
# A lease in one word: parts per million of the limit, whether they begin with a full bucket, and the
# millisecond until which they hold.
_PPM: Final = 1_000_000
_PPM_BITS: Final = 20
_UNTIL_AT: Final = _PPM_BITS + 1
_MASK: Final = (1 << 64) - 1
_DAY_NS: Final = 86_400_000_000_000


class PeerLimitSlot:
    """Another row's slot of one tenant or key, and its counts as they were read last."""

    def __init__(self, at: int, row: int) -> None:
        self.at = at
        self.row = row
        self.lives = False
        self.requests = self.requests_back = self.tokens = self.tokens_back = 0


class LimitSlot:
    """One tenant or key as this process sees it.

    Its own counts: requests and tokens reserved and refunded, since ever; requests that run; nano-units of
    money that were spent, and that running requests may yet spend; how often it was asked for, when last, and
    when its buckets are full again, in nanoseconds of the monotonic clock; of the budget's period in which it
    spent last, what was spent before it and its begin in Unix seconds. ``places`` are those of other rows.
    The growth (``d_``) and the other sums are those of all rows at the last :meth:`SharedLimits.look`.
    """

    def __init__(self, key: int) -> None:
        self.key = key
        self.at = 0
        self.requests = self.requests_back = self.tokens = self.tokens_back = 0
        self.running = self.spent = self.open = self.asked = self.asked_at = 0
        self.requests_full_at = self.tokens_full_at = 0
        self.spent_before = self.period_begin = 0
        self.accounting = -1
        self.places: list[PeerLimitSlot] = []
        self.version = -1
        self.d_requests = self.d_requests_back = self.d_tokens = self.d_tokens_back = 0
        self.all_running = self.all_spent = self.all_open = 0
        self.seen_requests_full_at = self.seen_tokens_full_at = 0
        self._looked_requests = self._looked_requests_back = 0
        self._looked_tokens = self._looked_tokens_back = 0

    @property
    def requests_since(self) -> float:
        """What was refunded here since the last look, less what was reserved."""
        back = self.requests_back - self._looked_requests_back
        return float(back - self.requests + self._looked_requests)

    @property
    def tokens_since(self) -> float:
        """As :attr:`requests_since`, of tokens."""
        back = self.tokens_back - self._looked_tokens_back
        return float(back - self.tokens + self._looked_tokens)

    def take_own(self) -> None:
        """Begin the sums with the slot's own counts."""
        self.d_requests = self.requests - self._looked_requests
        self.d_requests_back = self.requests_back - self._looked_requests_back
        self.d_tokens = self.tokens - self._looked_tokens
        self.d_tokens_back = self.tokens_back - self._looked_tokens_back
        self._looked_requests, self._looked_requests_back = self.requests, self.requests_back
        self._looked_tokens, self._looked_tokens_back = self.tokens, self.tokens_back
        self.all_running, self.all_spent, self.all_open = self.running, self.spent, self.open


def subject_key(name: str, *, is_key: bool) -> int:
    """The 64-bit hash by which a tenant or key is counted."""
    return hash_name(f"key {name}" if is_key else f"tenant {name}")


class SharedLimits:
    """One process's row of the file. ``row`` is a worker's number, or :data:`ACCOUNTING`.

    ``clock`` is the host's monotonic clock in seconds. Raises :class:`OSError` if no row is free.
    """

    def __init__(self, path: Path, row: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Instants of another start of the machine mean nothing in this one.
        layout = 2 << 56 | boot_key() >> 8
        rows = MappedRows(path, row, clock, layout=layout, size=_SLOTS.words, rows=ROWS + 1)
        self._rows = rows
        self.counts = rows.counts
        self._words, self._map = rows.words, rows.map
        self._accounting_head = ACCOUNTING * HEADER
        self._mine: dict[int, int] = {}
        self._written: list[int] = []
        self._living: frozenset[int] = frozenset()
        self._seen: object = None
        self._version = 0
        # Of other rows: what changes with their keys, and the version in which it did last.
        self._keys_versions: dict[int, tuple[int, int]] = {}
        self._changed_in: dict[int, int] = {}
        self._keys: list[tuple[int, int]] = []
        self._keys_version = -1
        # The accounting process publishes from several threads.
        self._lock = threading.Lock()
        self._adopt()
        self.beat()

    def beat(self) -> None:
        """Report that this process lives, and look which others do."""
        with self._lock:
            self._rows.beat()
            self._follow()

    def open(self, key: int, *, counts: bool) -> LimitSlot:
        """The slot of a tenant or key, which this process counts from now on if it ``counts``."""
        slot = LimitSlot(key)
        slot.at = self._mine.get(key, 0)
        if counts and not slot.at:
            slot.at = self._claim(key)
        if slot.at:
            (
                slot.requests, slot.requests_back, slot.tokens, slot.tokens_back, slot.running, slot.spent,
                slot.open, slot.asked, slot.asked_at, slot.requests_full_at, slot.tokens_full_at,
                slot.spent_before, slot.period_begin,
            ) = _COUNTS.unpack_from(self._map, slot.at * 8 + 8)  # fmt: skip
        self._find(slot)
        self.look(slot)
        slot.seen_requests_full_at = max(slot.seen_requests_full_at, slot.requests_full_at)
        slot.seen_tokens_full_at = max(slot.seen_tokens_full_at, slot.tokens_full_at)
        return slot

    def write(self, slot: LimitSlot) -> None:
        """Show the slot's counts to the others; nothing where :meth:`holds` is not so any more."""
        if self._words[slot.at] == slot.key:
            _COUNTS.pack_into(
                self._map, slot.at * 8 + 8,
                slot.requests, slot.requests_back, slot.tokens, slot.tokens_back, slot.running, slot.spent,
                slot.open, slot.asked, slot.asked_at, slot.requests_full_at, slot.tokens_full_at,
                slot.spent_before, slot.period_begin,
            )  # fmt: skip

    def write_levels(self, slot: LimitSlot) -> None:
        """Show when the slot's buckets are full."""
        self.counts[slot.at + _REQUESTS_FULL_AT] = slot.requests_full_at
        self.counts[slot.at + _TOKENS_FULL_AT] = slot.tokens_full_at

    def holds(self, slot: LimitSlot) -> bool:
        """Whether the slot is still its key's: where over some 10,000 are in use, the least used give way."""
        return self._words[slot.at] == slot.key

    def look(self, slot: LimitSlot) -> None:
        """Take all rows' counts, and what they grew by since the last time."""
        if self._rows.has_news:
            self._follow()
        if slot.version != self._version:
            self._find(slot)
        slot.take_own()
        for place in slot.places:
            self._read(place, slot)

    def lease(self, slot: LimitSlot, now: float) -> tuple[float, bool]:
        """The share of its limits that this host has, and whether that begins with full buckets.

        All of it where there is no other host; 0 if there are others and it has no lease. While the database
        does not answer no host can get a lease: each goes on with an equal part.
        """
        head = self._accounting_head
        words = self._words
        hosts = words[head + _HOSTS]
        if hosts <= 1:
            return 1.0, False
        at = slot.accounting
        if at > 0 and words[at] == slot.key:
            lease = words[at + _LEASE]
            if lease >> _UNTIL_AT > now * 1e3:
                return (lease & (1 << _PPM_BITS) - 1) / _PPM, bool(lease >> _PPM_BITS & 1)
        return (0.0 if words[head + _ANSWERS_UNTIL] > now * 1e9 else 1.0 / hosts), False

    def spent_elsewhere(self, slot: LimitSlot) -> tuple[int, float] | None:
        """What the ledger knows beyond this host's counts, and the end of its period; ``None``: nothing.

        The sum of the rows' ``spent`` and this is what was spent in the period; this may be negative.
        """
        at = slot.accounting
        if at < 0 or self._words[at] != slot.key or not self._words[at + _PERIOD_END]:
            return None
        end = self.counts[at + _PERIOD_END]
        return self.counts[at + _SPENT_ELSEWHERE], inf if end < 0 else float(end)

    def spent_since(self, slot: LimitSlot, period_begin: int) -> int:
        """What this host's workers spent in the period that began then, also those that have ended."""
        spent = slot.spent - slot.spent_before if slot.period_begin == period_begin else 0
        counts = self.counts
        for place in slot.places:
            at = place.at
            if self._words[at] == slot.key and counts[at + _PERIOD_BEGIN] == period_begin:
                spent += counts[at + _SPENT] - counts[at + _SPENT_BEFORE]
        return spent

    def publish_access(self, revision: int) -> None:
        """Report that the tenants and keys of ``revision`` are in force in this worker."""
        self._words[self._rows.head + _ACCESS] = revision

    # The accounting process alone calls what follows.

    def access_in_force(self, revision: int) -> bool:
        """Whether all living workers of the host have the tenants and keys of ``revision``, or newer ones."""
        self.beat()
        return (
            min([self._words[row * HEADER + _ACCESS] for row in self._living], default=revision) >= revision
        )

    def publish_spent(self, key: int, nano: int, spent_by_host: int, period_end: float) -> None:
        """Report what a tenant or key spent in the period that ends at ``period_end`` (Unix seconds).

        ``nano`` is from the ledger. ``spent_by_host`` is :meth:`spent_by_host` as it was before that was
        read, so that what workers spent meanwhile is counted twice for a moment, not forgotten.
        """
        with self._lock:
            at = self._mine.get(key) or self._claim(key)
            # The end first: with the former period's sum the budget is refused for a moment, not exceeded.
            self.counts[at + _PERIOD_END] = -1 if period_end == inf else int(period_end)
            self.counts[at + _SPENT_ELSEWHERE] = nano - spent_by_host
            self.counts[at + _ASKED_AT] = int(self._clock() * 1e9)

    def spent_by_host(self, key: int) -> int:
        """The sum of what this host's workers ever counted as spent by a tenant or key."""
        found = [self._rows.find(_SLOTS, row, key) for row in self._written if row != ACCOUNTING]
        return sum([self.counts[at + _SPENT] for at in found if at > 0])

    def publish_lease(self, key: int, share: float, until: float, *, full: bool) -> None:
        """Report that this host has ``share`` of a tenant's or key's limits until this instant."""
        word = int(until * 1e3) << _UNTIL_AT | int(full) << _PPM_BITS | int(share * _PPM)
        with self._lock:
            at = self._mine.get(key) or self._claim(key)
            self._words[at + _LEASE] = word & _MASK
            self.counts[at + _ASKED_AT] = int(self._clock() * 1e9)

    def publish_hosts(self, hosts: int, answers_until: float) -> None:
        """Report how many hosts there are, as the database knew until this instant."""
        head = self._accounting_head
        self._words[head + _ANSWERS_UNTIL] = int(answers_until * 1e9)
        self._words[head + _HOSTS] = hosts

    def asked(self) -> dict[int, tuple[int, float]]:
        """How often the tenants and keys were asked for that workers count, and when last."""
        found: dict[int, tuple[int, float]] = {}
        with self._lock:
            if self._rows.has_news:
                self._follow()
        if self._keys_version != self._version:
            self._keys_version = self._version
            others = [row for row in self._written if row not in (ACCOUNTING, self._rows.row)]
            self._keys = [entry for row in others for entry in self._claimed(row).items()]
        mine = [] if self._rows.row == ACCOUNTING else list(self._mine.items())
        for key, at in self._keys + mine:
            if self._words[at] == key:
                count, when = found.get(key, (0, 0.0))
                latest = max(when, self.counts[at + _ASKED_AT] / 1e9)
                found[key] = count + self.counts[at + _ASKED], latest
        return found

    def close(self) -> None:
        """Leave: what runs here is over, what was used stays counted."""
        self._rows.close()

    def _adopt(self) -> None:
        """Go on with the counts of the row's last process; nothing of it runs any more."""
        rows = self._rows
        if rows.began_anew:
            self._map[rows.base * 8 : (rows.base + _SLOTS.words) * 8] = bytes(_SLOTS.words * 8)
            self._words[rows.head + _HOSTS] = self._words[rows.head + _ANSWERS_UNTIL] = 0
        self._mine = self._claimed(rows.row)
        if rows.row != ACCOUNTING:
            self._words[rows.head + _ACCESS] = 0
            for at in self._mine.values():
                self.counts[at + _RUNNING] = self.counts[at + _OPEN] = 0
        rows.begin()

    def _claimed(self, row: int) -> dict[int, int]:
        """Where the row counts which key."""
        begin, wide = self._rows.tables(row), 1 + _SLOTS.counts
        keys = self._words[begin : begin + _SLOTS.words : wide].tolist()
        return {key: begin + i * wide for i, key in enumerate(keys) if key}

    def _claim(self, key: int) -> int:
        """A slot for ``key`` in this row: a free one, else that of the key that was not asked for longest."""
        rows, counts = self._rows, self.counts
        at = rows.free(_SLOTS, key)
        if at < 0:
            at = min(_SLOTS.window(rows.base, key), key=self._usefulness)
            self._mine.pop(self._words[at], None)
        rows.claim(_SLOTS, at, key, announce=True)
        counts[at + _ASKED_AT] = int(self._clock() * 1e9)
        self._mine[key] = at
        return at

    def _usefulness(self, at: int) -> int:
        """When the key at ``at`` was asked for; what runs or has debts is kept before all else."""
        counts = self.counts
        full_at = max(counts[at + _REQUESTS_FULL_AT], counts[at + _TOKENS_FULL_AT])
        later = _DAY_NS if counts[at + _RUNNING] else 0
        return max(counts[at + _ASKED_AT], full_at) + later

    def _follow(self) -> None:
        """Look which rows there are; slots are found anew in those that have other keys."""
        peers = self._rows.peers()
        if peers != self._seen:
            self._seen = peers
            self._written = self._rows.written()
            self._living = frozenset([peer.row for peer in peers])
            self._version += 1
            found = {row: self._rows.keys_version(row) for row in self._written if row != self._rows.row}
            for row in found.keys() | self._keys_versions.keys():
                if found.get(row) != self._keys_versions.get(row):
                    self._changed_in[row] = self._version
            self._keys_versions = found

    def _find(self, slot: LimitSlot) -> None:
        """Where other rows count the slot's key. Those found for the first time began after the last look.

        Rows that have the keys of the last time are not searched again: there may be hundreds.
        """
        known = {place.at: place for place in slot.places}
        changed = [row for row, version in self._changed_in.items() if version > slot.version]
        places = [place for place in slot.places if place.row not in changed]
        for row in changed:
            at = self._rows.find(_SLOTS, row, slot.key) if row in self._keys_versions else -1
            if row == ACCOUNTING:
                slot.accounting = at
            elif at > 0:
                places.append(known.get(at) or PeerLimitSlot(at, row))
        for place in places:
            place.lives = place.row in self._living
        slot.places = places
        slot.version = self._version

    def _read(self, place: PeerLimitSlot, slot: LimitSlot) -> None:
        """Add what a place has grown by; one that another key has taken counts nothing."""
        (
            key, requests, requests_back, tokens, tokens_back, running, spent, open_, _, _,
            requests_full_at, tokens_full_at, _, _,
        ) = _WORDS.unpack_from(self._map, place.at * 8)  # fmt: skip
        if key & _MASK != slot.key:
            return
        if requests < place.requests or tokens < place.tokens:  # taken by others meanwhile, and again
            place.requests = place.requests_back = place.tokens = place.tokens_back = 0
        slot.d_requests += requests - place.requests
        slot.d_requests_back += requests_back - place.requests_back
        slot.d_tokens += tokens - place.tokens
        slot.d_tokens_back += tokens_back - place.tokens_back
        place.requests, place.requests_back = requests, requests_back
        place.tokens, place.tokens_back = tokens, tokens_back
        slot.all_spent += spent
        if place.lives:
            slot.all_running += running
            slot.all_open += open_
        slot.seen_requests_full_at = max(slot.seen_requests_full_at, requests_full_at)
        slot.seen_tokens_full_at = max(slot.seen_tokens_full_at, tokens_full_at)
