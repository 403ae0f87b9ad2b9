"""The usage of each request in mapped files, which the accounting process adds to the ledger.

One worker writes a segment, and holds its lock while it lives; nobody else writes it. What is written
survives the worker. Where no segment can be made (a full disk, no descriptor), requests are served
unrecorded, and counted as such.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import secrets
from pathlib import Path
from time import time
from typing import Final

import msgspec

from gateway.intake.rate_limiter import RequestReservation
from gateway.protocol.usage import TokenUsage
from gateway.telemetry.structured_log import StructuredLog
from policy.config.deployment import Deployment
from policy.request import Request
from policy.tenancy.price import FREE, TokenRates, rates_of
from policy.tenancy.token_count import cached_weight, used_tokens
from policy.tenancy.usage_slot import (
    AT_MS,
    CHECK,
    DIMS_SHIFT,
    DONE,
    ESTIMATED,
    EVENTS,
    HALF,
    OPEN,
    OUTPUT,
    PROMPT,
    STATE,
    WORDS,
    UsageDims,
)
from policy.types import Priority
from store.event_loop.timer_coalescing import sleep_to_next
from store.state_dir import own_directory
from store.usage_segments import DIMS_BYTES, HEADER_WORDS, MAGIC, SEGMENT_SUFFIX, SLOTS

# Compared for each request: machine code reads a constant faster than a member of an enumeration.
_BATCH: Final = Priority.BATCH

# A segment is made ahead when the current one is half used.
PREPARE_EVERY_S: Final = 0.5
RETRY_S: Final = 1.0
# No request has more: an engine's number beyond it is none.
MOST_TOKENS: Final = 1 << 28


class JournalSegment:
    """A file of this process; raises :class:`OSError` if it cannot be made.

    ``used`` slots were taken, ``unfinished`` of them are not done. All of its room is allocated: on a full
    disk a write to a hole would end the process (SIGBUS).
    """

    def __init__(self, directory: Path, slots: int = SLOTS) -> None:
        path = directory / f"{secrets.token_hex(16)}{SEGMENT_SUFFIX}"
        self._dims_end = self._dims_at = 8 * (HEADER_WORDS + slots * WORDS)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # A reader takes a file without a size for one that is being made.
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._reserve(DIMS_BYTES)
            self.words = memoryview(mmap.mmap(self._file, self._dims_at)).cast("Q")
        except BaseException:
            path.unlink(missing_ok=True)
            self.close()
            raise
        self.words[1] = slots
        self.words[0] = MAGIC
        self.slots = slots
        self.used = self.unfinished = 0
        self._dims: dict[tuple[str, str, str, str, TokenRates], int] = {}

    def dims(self, tenant: str, key: str, model: str, adapter: str, rates: TokenRates) -> int:
        """The number of these dimensions, written at their first use; raises ``OSError``."""
        of = tenant, key, model, adapter, rates
        number = self._dims.get(of, -1)
        if number < 0:
            number = len(self._dims)
            dims = UsageDims(
                tenant=tenant,
                key=key,
                model=model,
                adapter=adapter,
                rates=(rates.prompt, rates.cached, rates.output),
            )
            line = msgspec.json.encode(dims) + b"\n"
            self._reserve(len(line))
            os.pwrite(self._file, line, self._dims_at)
            self._dims_at += len(line)
            self._dims[of] = number
        return number

    def close(self) -> None:
        """Give the file up: what is open in it counts as interrupted."""
        if self._file >= 0:
            # The mapping has a copy of the descriptor, and so of the lock.
            fcntl.flock(self._file, fcntl.LOCK_UN)
            os.close(self._file)
            self._file = -1

    def _reserve(self, size: int) -> None:
        """Allocate room for ``size`` bytes of dimensions."""
        if self._dims_at + size > self._dims_end:
            end = self._dims_at + max(size, DIMS_BYTES)
            os.posix_fallocate(self._file, 0, end)
            self._dims_end = end


class UsageJournal:
    """The segments of one worker. ``unrecorded`` counts requests that found no room."""

    def __init__(self, directory: Path, log: StructuredLog, slots: int = SLOTS) -> None:
        self._directory = own_directory(directory)
        self._log = log
        self._slots = slots
        self._segment: JournalSegment | None = None
        self._next: JournalSegment | None = None
        self._retry_at = 0.0
        self._rates: dict[str, TokenRates] = {}
        self._batch_rates: dict[str, TokenRates] = {}
        self.unrecorded = 0

    def read(self, deployment: Deployment) -> None:
        """Take the prices of the deployment."""
        prices = {spec.name: spec.price for spec in deployment.models}
        self._rates = {name: rates_of(price) for name, price in prices.items()}
        self._batch_rates = {name: rates_of(price, batch=True) for name, price in prices.items()}

    def charge(self, request: Request, tenant: str, key: str, adapter: str) -> UsageCharge:
        """The charge of ``request`` for a tenant and its key; ``adapter`` is empty or the one it names."""
        model = request.model
        rates = self._batch_rates if request.priority is _BATCH else self._rates
        return UsageCharge(self, tenant, key, model, adapter, rates.get(model, FREE), request.prompt_tokens)

    def take(self, charge: UsageCharge) -> bool:
        """Open a slot for ``charge``; whether there was one."""
        at = time()
        segment = self._segment
        try:
            if segment is None or segment.used == segment.slots:
                segment = self._following(segment, at)
            dims = segment.dims(charge.tenant, charge.key, charge.model, charge.adapter, charge.rates)
        except OSError as error:
            self._lose(at, error)
            return False
        words, place = segment.words, HEADER_WORDS + segment.used * WORDS
        segment.used += 1
        segment.unfinished += 1
        state = dims << DIMS_SHIFT
        words[place + AT_MS] = int(at * 1000)
        words[place + PROMPT] = charge.prompt
        words[place + STATE] = state | OPEN
        charge.segment, charge.words, charge.place, charge.state = segment, words, place, state
        charge.at_ms = int(at * 1000)
        return True

    def finished(self, segment: JournalSegment) -> None:
        """A slot of ``segment`` is done."""
        segment.unfinished -= 1
        if segment.unfinished == 0 and segment is not self._segment:
            segment.close()

    def prepare(self) -> None:
        """Make the next segment if the current one is half used; in a thread."""
        if self._wants_next():
            self._next = JournalSegment(self._directory, self._slots)

    def _wants_next(self) -> bool:
        segment = self._segment
        return self._next is None and segment is not None and segment.used > segment.slots // 2

    async def run(self) -> None:
        """Keep a segment ahead."""
        while True:
            await sleep_to_next(PREPARE_EVERY_S)
            if not self._wants_next():
                continue
            try:
                await asyncio.to_thread(self.prepare)
            except OSError as error:
                self._log.warning("usage_segment_failed", cause=error)

    def close(self) -> None:
        """Give all segments up."""
        for segment in (self._segment, self._next):
            if segment is not None:
                segment.close()
        self._segment = self._next = None

    def _following(self, former: JournalSegment | None, at: float) -> JournalSegment:
        """The segment after ``former``, which is full; raises ``OSError``, a while after an error at once."""
        following, self._next = self._next, None
        if following is None:
            if at < self._retry_at:
                raise OSError("no segment could be made a moment ago")
            following = JournalSegment(self._directory, self._slots)
        self._segment = following
        if former is not None and former.unfinished == 0:
            former.close()
        return following

    def _lose(self, at: float, error: OSError) -> None:
        self.unrecorded += 1
        if at >= self._retry_at:
            self._retry_at = at + RETRY_S
            self._log.error("usage_unrecorded", cause=error, requests=self.unrecorded)


class UsageCharge:
    """What the tenant of one call is charged for: tokens by :attr:`rates`, each call once.

    ``prompt`` is an estimate until the engine reports. Nothing is charged before :meth:`begin`, which is
    called when the first part of an answer goes to the client. ``ended``: the counts are final, and
    ``estimated`` if no engine reported them; ``reservation`` is settled then. ``segment``, ``words``,
    ``place``, ``state`` and ``at_ms`` are those of its slot.
    """

    def __init__(  # noqa: PLR0917 - made for each request, in one place
        self, journal: UsageJournal, tenant: str, key: str, model: str, adapter: str, rates: TokenRates,
        prompt_tokens: int,
    ) -> None:  # fmt: skip
        self._journal = journal
        self.tenant = tenant
        self.key = key
        self.model = model
        self.adapter = adapter
        self.rates = rates
        self.prompt = _bounded(prompt_tokens)
        self.cached = self.output = 0
        self._events = self._reported_at = 0
        self.begun = self.ended = self.estimated = False
        self.reservation: RequestReservation | None = None
        self.segment: JournalSegment | None = None
        self.words: memoryview | None = None
        self.place = 0
        self.state = 0
        self.at_ms = 0

    @property
    def cost_nano(self) -> int:
        """The cost in nano-units of the currency; 0 before the answer begins."""
        return self.rates.cost(self.prompt, self.cached, self.output) if self.begun else 0

    def begin(self) -> None:
        """The first part of the answer goes to the client."""
        if not self.begun:
            self.begun = True
            self._journal.take(self)

    def relay(self, events: int) -> None:
        """Record that ``events`` of a stream are relayed when the next bytes reach the client."""
        self._events = events
        words = self.words
        if words is not None:
            words[self.place + EVENTS] = events

    def report(self, usage: TokenUsage, events: int) -> None:
        """Record the ``usage`` that the engine reported within a stream, with event number ``events``."""
        self._count(usage)
        self._reported_at = min(events, self._events)
        words = self.words
        if words is not None:
            words[self.place + PROMPT] = self.prompt | self.cached << HALF
            words[self.place + OUTPUT] = self.output | self._reported_at << HALF

    def end(self, usage: TokenUsage | None) -> None:
        """The answer has ended: with this ``usage``, or cut short, so that what was relayed counts.

        Called before the last bytes are sent; does nothing where no part of an answer was.
        """
        if not self.begun or self.ended:
            return
        self.ended = True
        if usage is None:
            self.output += max(0, self._events - self._reported_at)
            self._reported_at = self._events
            self.estimated = True
        else:
            self._count(usage)
            self.estimated = not usage.exact
        self._finish()
        if (reservation := self.reservation) is not None:  # the ledger first: what is spent is in it then
            weight = cached_weight(self.rates.prompt, self.rates.cached)
            tokens = used_tokens(self.prompt, self.cached, self.output, weight)
            reservation.settle(tokens, self.cost_nano, began=True)

    def _finish(self) -> None:
        """Write the final counts to the slot, if there is one."""
        words, segment = self.words, self.segment
        if words is None or segment is None:
            return
        place = self.place
        state = self.state | (DONE | ESTIMATED if self.estimated else DONE)
        prompt, output = self.prompt | self.cached << HALF, self.output | self._reported_at << HALF
        words[place + PROMPT] = prompt
        words[place + OUTPUT] = output
        words[place + CHECK] = state + self.at_ms + prompt + output
        words[place + STATE] = state
        self.words = self.segment = None
        self._journal.finished(segment)

    def _count(self, usage: TokenUsage) -> None:
        if usage.exact or usage.prompt > 0:
            self.prompt = _bounded(usage.prompt)
        self.cached = min(_bounded(usage.cached), self.prompt)
        self.output = _bounded(usage.completion)
        self._reported_at = self._events


def _bounded(tokens: int) -> int:
    return max(0, min(tokens, MOST_TOKENS))
