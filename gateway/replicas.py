"""What this worker knows of each replica, from the replica itself."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable

import msgspec

from gateway.feed import Feed
from gateway.shared import ALONE, Shared
from gateway.upstream import Pool
from policy.errors import Refusal
from policy.routing import Candidate
from policy.types import Load, Replica, ReplicaState
from store.state import SECRET_HEADER


class _LoadLine(msgspec.Struct):
    """A line of a replica's ``/internal/load``."""

    state: ReplicaState
    load: Load
    adapters: tuple[str, ...] = ()


_decoder = msgspec.json.Decoder(_LoadLine)


class Link:
    """One replica as seen from one worker: its connections, its own count and what we sent since.

    ``answering`` is whether the replica itself can be heard, ``open`` whether it takes requests by
    its own word; both follow the stream of its load, or a probe where there is none (external).
    """

    def __init__(
        self, replica: Replica, connect_timeout_s: float, secret: str | None, shared: Shared = ALONE
    ) -> None:
        self.id = replica.id
        self.label = replica.id.encode()
        self.model = replica.model
        self.url = replica.url
        self.replica = replica
        self.pool = Pool(replica.url, connect_timeout_s)
        self.constant_head = b"host: " + self.pool.host_header + b"\r\ncontent-type: application/json\r\n"
        if secret is not None:
            self.constant_head += f"{SECRET_HEADER}: {secret}\r\n".encode()
        self.adapters = frozenset(replica.adapters)
        self.answering = False
        self.open = True
        self.full = False
        self.counted = 0
        self.view = Candidate(replica.id, key_of(replica.id), bound=replica.load.bound)
        self.mine = 0
        self.heard_at: float | None = None
        self._shared = shared
        self._host_when_counted = 0
        self._feed: Feed | None = None
        self._following: asyncio.Task[None] | None = None

    @property
    def admissible(self) -> bool:
        """Whether a request may be sent now, its bound aside."""
        return self.answering and self.open and not self.full and self.replica.state is ReplicaState.READY

    @property
    def in_flight(self) -> int:
        """The replica's own last count, corrected by what this host's workers began and ended since."""
        return max(0, self.counted - self._host_when_counted) + self._host()

    @property
    def bound(self) -> int:
        """How many requests it admits, 0 if it states none."""
        return self.view.bound

    def look(self) -> Candidate:
        """The view of this instant, with what this host's other workers have there."""
        self.view.in_flight = self.in_flight
        return self.view

    def begin(self) -> None:
        """A request goes there."""
        self.mine += 1
        self.view.begun += 1
        self._shared.begin(self.view.key, 0)

    def end(self) -> None:
        """A request of this worker ended there."""
        self.mine -= 1
        self._shared.end(self.view.key)

    def _host(self) -> int:
        """Requests that this host's workers have there."""
        return self.mine + self._shared.others(self.view.key)[0]

    def count(self, line: bytes, at: float) -> None:
        """Take a line of the replica's load stream; ``at`` is loop time."""
        said = _decoder.decode(line)
        self.counted = said.load.in_flight
        self.view.bound = said.load.bound
        self.view.kv_used = said.load.kv_used
        self._host_when_counted = min(self._host(), said.load.in_flight)
        self.adapters = frozenset(said.adapters)
        self.open = said.state is ReplicaState.READY
        self.answering = True
        self.full = False
        self.heard_at = at

    def refused(self, reason: Refusal) -> None:
        """The replica did not take a request; what it says next decides again."""
        if reason is Refusal.BUSY:
            self.full = True
        else:
            self.open = False

    def lost(self) -> None:
        """It cannot be reached: out of rotation until it is heard again."""
        self.answering = False

    def subscribe(self, secret: str, on_change: Callable[[Link], None]) -> None:
        """Follow the replica's own count until :meth:`close`."""
        loop = asyncio.get_running_loop()

        def on_line(line: bytes) -> None:
            try:
                self.count(line, loop.time())
            except ValueError:  # what cannot be understood is not heard
                self.lost()
            on_change(self)

        def on_down() -> None:
            if self.answering:
                self.lost()
                on_change(self)

        self._feed = Feed(
            self.url,
            "/internal/load",
            secret,
            self.pool.connect_timeout_s,
            on_line=on_line,
            on_down=on_down,
        )
        self._following = asyncio.create_task(self._feed.run())

    def retry_now(self) -> None:
        """The fleet has news of this replica: look at once."""
        if self._feed is not None:
            self._feed.retry_now()

    def close(self) -> None:
        """No more requests; those in flight go on on their own connections."""
        self.answering = False
        if self._following is not None:
            self._following.cancel()
        self.pool.close()


def key_of(replica_id: str) -> int:
    """The 64-bit key of a replica, alike in every process."""
    return int.from_bytes(hashlib.blake2b(replica_id.encode(), digest_size=8).digest())
