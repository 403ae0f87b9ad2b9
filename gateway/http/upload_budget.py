"""The budget for received bytes: what clients have sent of requests that the app does not have yet.

Beyond half of the budget, connections wait unread, but for the one with the least left to send: short bodies
are completed first, and one always goes on. A connection that is read and sends next to nothing is then
refused. Beyond the whole budget, the one with the most left is refused. The connections of a client address
have such a budget too.

Bodies that are complete and not checked by the app are part of the budget. While there are some, no
connection goes on beyond the half: the app checks them without it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Final, Protocol

from gateway.http.read_turns import PARSED_BYTES, READ_BYTES
from gateway.protocol.errors import Refused
from policy.errors import Refusal

# The least bytes per second of a client that is sending a body.
MIN_RATE: Final = 8 * 1024
# What a connection that goes on is expected to add before it waits again: few are read at a time.
GOES_ON_BYTES: Final = 4 * READ_BYTES
# Refused, or read on, in one turn of the event loop, in 5 ms.
MOST_AT_ONCE: Final = 128


class UploadReceiver(Protocol):
    """A connection as the budget sees it."""

    def hold_back(self) -> None:
        """Stop reading until :meth:`read_on`."""

    def read_on(self) -> None:
        """Read again."""

    def shed(self, refused: Refused) -> None:
        """Forget what was received, and answer with ``refused``."""


class Upload:
    """What a connection holds. ``left``: the bytes that it may still send; ``waiting``: it is not read.

    ``received``: its bytes since the last sweep; ``slow``: they were too few in the whole time between two.
    """

    def __init__(self, receiver: UploadReceiver, everyone: UploadQuota, own: UploadQuota) -> None:
        self.receiver = receiver
        self.everyone = everyone
        self.own = own
        self.held = self.left = self.received = 0
        self.waiting = self.slow = self.watched = False

    def read_size(self) -> int:
        """How many bytes its connection may read at once: an even part of what the half has left.

        Those that are read when the half is reached exceed it by a small read each.
        """
        size = READ_BYTES
        for share in (self.everyone, self.own):
            reading = len(share.uploads) - share.waiting
            if reading > 1:
                size = min(size, (share.half - share.held) // reading)
        return max(size, PARSED_BYTES)


class PendingBody:
    """A body of ``size`` bytes that is complete and that the app has not checked."""

    __slots__ = ("everyone", "own", "size")

    def __init__(self, everyone: UploadQuota, own: UploadQuota, size: int) -> None:
        self.everyone = everyone
        self.own = own
        self.size = size


class UploadQuota:
    """The budget of the worker or of one client address; ``half`` of it is free to all.

    ``held``: the bytes of uploads and of pending bodies; ``pending``: those of the latter.
    """

    def __init__(self, address: str, limit: int) -> None:
        self.address = address
        self.set_limit(limit)
        self.held = self.pending = self.waiting = 0
        self.uploads: dict[Upload, None] = {}
        # Whether one of them may be slow.
        self.has_slow = False

    def set_limit(self, limit: int) -> None:
        self.limit, self.half = limit, limit // 2

    def first(self) -> Upload | None:
        """That with the least left; a loop takes a tenth of the time of ``min`` here."""
        first: Upload | None = None
        for upload in self.uploads:
            if first is None or upload.left < first.left:
                first = upload
        return first

    def is_full_for(self, upload: Upload) -> bool:
        """Whether ``upload`` must wait."""
        if self.held <= self.half:
            return False
        return bool(self.pending) or upload is not self.first()


class UploadBudget:
    """The budgets of a worker. ``limits`` are the bytes for all connections, and for those of one address.

    ``later`` calls a function a few milliseconds later: when thousands of uploads end at once, those that
    wait are looked at once.
    """

    def __init__(
        self,
        limits: Callable[[], tuple[int, int]],
        later: Callable[[Callable[[], None]], object] = lambda function: function(),
    ) -> None:
        self._limits = limits
        self._later = later
        self._is_due = False
        total, self._per_address = limits()
        self._everyone = UploadQuota("", total)
        self._by_address: dict[str, UploadQuota] = {}

    @property
    def limit(self) -> int:
        """The bytes for all connections."""
        return self._everyone.limit

    def begin(self, receiver: UploadReceiver, peer: object) -> Upload:
        """An upload from ``peer``, a socket's address."""
        own = self._quota(peer)
        upload = Upload(receiver, self._everyone, own)
        self._everyone.uploads[upload] = own.uploads[upload] = None
        return upload

    def keep(self, peer: object, size: int) -> PendingBody:
        """Count a complete body from ``peer`` until :meth:`release`."""
        body = PendingBody(self._everyone, self._quota(peer), size)
        for share in (body.everyone, body.own):
            share.held += size
            share.pending += size
        return body

    def release(self, body: PendingBody) -> None:
        """The app has checked the body, or will not."""
        for share in (body.everyone, body.own):
            share.held -= body.size
            share.pending -= body.size
        self._forget_unused(body.own)
        self._freed()

    def _quota(self, peer: object) -> UploadQuota:
        address = _address(peer)
        own = self._by_address.get(address)
        if own is None:
            own = self._by_address[address] = UploadQuota(address, self._per_address)
        return own

    def _forget_unused(self, own: UploadQuota) -> None:
        if not own.uploads and not own.pending:
            del self._by_address[own.address]

    def hold(self, upload: Upload, held: int, left: int) -> None:
        """The connection holds ``held`` bytes now, and may send ``left`` more."""
        grown = held - upload.held
        upload.held, upload.left = held, left
        everyone, own = upload.everyone, upload.own
        everyone.held += grown
        own.held += grown
        if grown > 0:
            upload.received += grown
            if everyone.held > everyone.half:
                self._relieve(everyone, upload)
            if own.held > own.half:
                self._relieve(own, upload)
        elif grown < 0:
            self._freed()

    def end(self, upload: Upload) -> None:
        """The connection holds nothing any more. May be called again."""
        if self._remove(upload):
            self._freed()

    def sweep(self, period_s: float) -> None:
        """Find the slow ones, and read the limits again; called every ``period_s``."""
        total, self._per_address = self._limits()
        self._everyone.set_limit(total)
        for share in self._by_address.values():
            share.set_limit(self._per_address)
        for upload in self._everyone.uploads:
            upload.slow = upload.watched and upload.received < MIN_RATE * period_s
            upload.watched = not upload.waiting
            upload.received = 0
        for share in [self._everyone, *self._by_address.values()]:
            share.has_slow = True
            self._shed_slow(share)
        self._let_waiting_go_on()

    def _freed(self) -> None:
        if self._everyone.waiting and not self._is_due:
            self._is_due = True
            self._later(self._let_waiting_go_on)

    def _relieve(self, share: UploadQuota, grown: Upload) -> None:
        self._shed_slow(share)
        while share.held > share.limit and len(share.uploads) > 1:
            busy = Refused(Refusal.BUSY, "Too many large requests are being received.")
            self._shed(max(share.uploads, key=_left), busy)
        if grown in share.uploads and not grown.waiting and share.is_full_for(grown):
            grown.slow = grown.watched = False
            self._set_waiting(grown, True)
            grown.receiver.hold_back()

    def _shed_slow(self, share: UploadQuota) -> None:
        if share.held <= share.half or not share.has_slow:
            return
        if not (slow := [upload for upload in share.uploads if upload.slow]):
            share.has_slow = False
            return
        # By what they hold, so that few are refused.
        for upload in sorted(slow, key=_held, reverse=True)[:MOST_AT_ONCE]:
            message = "The request arrives too slowly while many others do."
            self._shed(upload, Refused(Refusal.TOO_SLOW, message))
            if share.held <= share.half:
                return

    def _shed(self, upload: Upload, refused: Refused) -> None:
        self._remove(upload)
        upload.receiver.shed(refused)

    def _remove(self, upload: Upload) -> bool:
        own = upload.own
        if upload not in own.uploads:
            return False
        was_read = not upload.waiting
        if upload.waiting:
            self._set_waiting(upload, False)
        for share in (upload.everyone, own):
            del share.uploads[upload]
            share.held -= upload.held
        self._forget_unused(own)
        # It may have been the one that goes on.
        for share in (own, upload.everyone) if was_read else ():
            first = share.first() if share.waiting else None
            if first is not None and first.waiting and not self._must_wait(first):
                self._read_on(first)
        return True

    def _set_waiting(self, upload: Upload, waiting: bool) -> None:
        upload.waiting = waiting
        change = 1 if waiting else -1
        upload.everyone.waiting += change
        upload.own.waiting += change

    def _must_wait(self, upload: Upload) -> bool:
        return upload.everyone.is_full_for(upload) or upload.own.is_full_for(upload)

    def _read_on(self, upload: Upload) -> None:
        self._set_waiting(upload, False)
        upload.received = 0
        upload.receiver.read_on()

    def _let_waiting_go_on(self) -> None:
        """Read the connections that wait, those with the least left first, as far as there is room."""
        self._is_due = False
        if not self._everyone.waiting:
            return
        going_on = 0
        expected: dict[UploadQuota, int] = {}
        for upload in sorted(self._everyone.uploads, key=_left):
            added = min(upload.left, GOES_ON_BYTES)
            goes_on = upload.waiting
            shares = (upload.everyone, upload.own)
            for share in shares:
                if (share in expected or share.pending) and (
                    expected.get(share, share.held) + added > share.half
                ):
                    goes_on = False
            for share in shares:
                expected[share] = expected.get(share, share.held) + (added if goes_on else 0)
            if goes_on:
                self._read_on(upload)
                going_on += 1
                if going_on == MOST_AT_ONCE:
                    self._freed()
                    return


def _left(upload: Upload) -> int:
    return upload.left


def _held(upload: Upload) -> int:
    return upload.held


def _address(peer: object) -> str:
    """The client's address; of an IPv6 address its network, since a client has all addresses of one."""
    host = str(peer[0]) if isinstance(peer, tuple) else ""
    if ":" in host and not host.startswith("::ffff:"):
        return socket.inet_pton(socket.AF_INET6, host.partition("%")[0])[:8].hex()
    return host
