"""Adds what gateway workers recorded to the ledger: each request once, whatever is killed meanwhile.

The slots that a transaction adds are marked in a bitmap by the same transaction. A segment is deleted when
its worker has ended and the ledger has all of it, and only then the bitmap.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from time import time

from policy.errors import Unreachable
from policy.tenancy.price import TokenRates
from policy.tenancy.usage_slot import UsageDims, UsageRecord
from policy.wire.usage_query import LedgerStatus
from store.database import Database
from store.state_dir import own_directory
from store.tenancy import ledger, spending
from store.tenancy.ledger import LedgerKey, UsageTotals
from store.tenancy.spending import SpendBudget
from store.usage_segments import SEGMENT_SUFFIX, SegmentReader

log = logging.getLogger("tidegate.accounting")

# Slots in one transaction: a second or so, in which other processes wait for the database.
BATCH_SLOTS = 20_000
# Open segments: each takes two descriptors. Workers have one or two each.
MAX_OPEN = 1024
# A file that is no segment after this time was left by a worker that died when it made it.
STALE_S = 60.0
_LOCK = ".lock"

Final = tuple[int, UsageRecord]
Spent = Counter[SpendBudget]


class LedgerWriter:
    """The ledger's only writer of one host. ``directory`` has the segments, ``host`` is this host's id.

    ``budgets`` are those that pay for a request of this tenant, key and instant. ``added`` is called with
    what was added to the ledger. ``batch_slots``: at most of one transaction; ``max_open``: segments.
    """

    def __init__(
        self,
        database: Callable[[], Database],
        directory: Path,
        host: str,
        budgets: Callable[[str, str, float], Iterable[SpendBudget]] = lambda tenant, key, at: (),
        added: Callable[[Mapping[LedgerKey, UsageTotals]], None] = lambda sums: None,
        *,
        batch_slots: int = BATCH_SLOTS,
        max_open: int = MAX_OPEN,
    ) -> None:
        self._database = database
        self._budgets = budgets
        self._added = added
        self._directory = own_directory(directory)
        self._host = host
        self._batch_slots, self._max_open = batch_slots, max_open
        self._readers: dict[str, SegmentReader] = {}
        self._lock: int | None = None
        self._orphans = True
        self._unopened = 0
        self._gave_way: set[str] = set()
        self._lost = 0
        self._drained_at = time()

    def drain(self) -> None:
        """Add all that is final to the ledger.

        Raises :class:`policy.errors.Unreachable` while the database is away, or another process drains.
        """
        self._lock_directory()
        more = True
        while more:
            self._find()
            while self._batch():
                pass
            more = self._delete_drained() and self._unopened > 0
        if self._orphans:
            with self._database().writing() as connection:
                ledger.forget_segments(connection, self._host, [path.stem for path in self._files()])
            self._orphans = False
        if self._unopened:
            self._give_way()
        self._drained_at = time()

    def status(self) -> LedgerStatus:
        """What is not in the ledger yet."""
        waiting = sum(reader.waiting() for reader in tuple(self._readers.values()))
        behind_s = max(0.0, time() - self._drained_at)
        segments = len(self._readers) + self._unopened
        return LedgerStatus(waiting=waiting, behind_s=behind_s, segments=segments, lost=self._lost)

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        if self._lock is not None:
            os.close(self._lock)

    def _lock_directory(self) -> None:
        """Two that drain one segment, which both may delete, could add it twice."""
        if self._lock is not None:
            return
        descriptor = os.open(self._directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise Unreachable("another accounting process drains the usage journal") from None
        self._lock = descriptor

    def _find(self) -> None:
        """Open new segments, as many as may be open."""
        new = [path for path in self._files() if path.stem not in self._readers]
        new.sort(key=lambda path: path.stem in self._gave_way)
        room = self._max_open - len(self._readers)
        self._unopened = max(0, len(new) - room)
        for path in new[:room]:
            try:
                self._readers[path.stem] = SegmentReader(path)
            except OSError as error:
                if time() - path.stat().st_mtime > STALE_S:
                    log.warning("usage_segment_unreadable: %s", error)
                    path.rename(path.with_suffix(".unreadable"))

    def _files(self) -> list[Path]:
        return list(self._directory.glob(f"*{SEGMENT_SUFFIX}"))

    def _give_way(self) -> None:
        """Close segments that are drained and in use, for those that could not be opened."""
        self._gave_way = {name for name, reader in self._readers.items() if not reader.final(1)}
        for name in self._gave_way:
            self._readers.pop(name).close()

    def _batch(self) -> bool:
        """Add a batch of slots in one transaction; whether there may be more."""
        batch: list[tuple[SegmentReader, list[Final]]] = []
        left = self._batch_slots
        for reader in self._readers.values():
            reader.look()
            if left and (found := reader.final(left)):
                batch.append((reader, found))
                left -= len(found)
        if not batch:
            return False
        marked: list[tuple[SegmentReader, bytearray]] = []
        with self._database().writing() as connection:
            sums: defaultdict[LedgerKey, UsageTotals] = defaultdict(UsageTotals)
            spent: Spent = Counter()
            for reader, found in batch:
                bitmap = reader.empty_bitmap()
                before = ledger.drained(connection, self._host, reader.name)
                bitmap[: len(before)] = before
                for slot, record in found:
                    if not bitmap[slot >> 3] >> (slot & 7) & 1:
                        self._count(sums, spent, reader, record)
                        bitmap[slot >> 3] |= 1 << (slot & 7)
                ledger.set_drained(connection, self._host, reader.name, bytes(bitmap))
                marked.append((reader, bitmap))
            spending.add(connection, spent)
            ledger.add(connection, sums)
        # Only what is committed is left out from now on.
        for reader, bitmap in marked:
            reader.drained = bitmap
        self._added(sums)
        return left == 0

    def _count(
        self, sums: dict[LedgerKey, UsageTotals], spent: Spent, reader: SegmentReader, record: UsageRecord
    ) -> None:
        dims = reader.dims(record.dims)
        if dims is None:
            self._lost += 1
            log.error("usage_lost: %s names dimensions that it lacks", reader.path)
            return
        counts = sums[_key_of(dims, record.at_s)]
        counts.requests += 1
        counts.prompt_tokens += record.prompt
        counts.cached_tokens += record.cached
        counts.output_tokens += record.output
        counts.interrupted += record.interrupted
        counts.estimated += record.estimated
        nano = TokenRates(*dims.rates).cost(record.prompt, record.cached, record.output)
        counts.cost_nano += nano
        for budget in self._budgets(dims.tenant, dims.key, record.at_s):
            spent[budget] += nano

    def _delete_drained(self) -> bool:
        """Delete segments that are in the ledger whole; whether there were some."""
        deleted = False
        for name, reader in list(self._readers.items()):
            if reader.abandoned and not reader.final(1):
                reader.path.unlink(missing_ok=True)
                reader.close()
                del self._readers[name]
                self._orphans = deleted = True
        return deleted


def _key_of(dims: UsageDims, at_s: float) -> LedgerKey:
    day = datetime.fromtimestamp(at_s, UTC).date().isoformat()
    return LedgerKey(day, dims.tenant, dims.key, dims.model, dims.adapter)
