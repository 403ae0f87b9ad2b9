"""The suspects of one worker and its host: requests that were in flight when replicas died."""

from __future__ import annotations

from collections import deque
from typing import Final

import xxhash

from gateway.protocol.errors import Refused
from gateway.protocol.json_decoders import RequestBody
from gateway.routing.shared_counters import SharedCounts
from policy.admission.crash_suspects import SAME_DEATH_S, CrashSuspects, SuspectRestriction
from policy.errors import Refusal

# Fields that do not change what an engine computes, or that clients draw anew when they send a request again.
VOLATILE: Final = frozenset(
    {
        "stream", "stream_options", "user", "seed", "metadata", "request_id", "session_id", "cache_salt",
        "prompt_cache_key", "safety_identifier", "service_tier", "store",
    }
)  # fmt: skip
# When another suspect has probably ended.
AGAIN_S: Final = 5
# A replica on which a request hung is found and killed within this time.
HUNG_S: Final = 60.0
# Requests that ended early, of which the last are kept.
MAX_ENDED: Final = 256


def fingerprint(tenant: str, path: str, body: RequestBody) -> int:
    """A hash of the request without volatile fields, never 0."""
    digest = xxhash.xxh3_64(f"{tenant}\0{path}".encode())
    for name in sorted(body.members.keys() - VOLATILE):
        digest.update(name.encode() + b"\0")
        digest.update(body.members[name])
    return digest.intdigest() or 1


class HostCrashSuspects:
    """What is held against requests; losses are shared by the workers of a host, which see deaths themselves.

    Instants are seconds of the host's monotonic clock.
    """

    def __init__(self, shared: SharedCounts) -> None:
        self._suspects = CrashSuspects()
        self._shared = shared
        # Requests, by fingerprint and replica, that ended early, and until when a death counts.
        self._ended: deque[tuple[int, int, float]] = deque(maxlen=MAX_ENDED)
        self._one_runs = False
        self.some = False

    def lost(self, request: int, replica: int, at: float) -> None:
        """The request with this fingerprint was lost on the replica with this key."""
        self._suspects.lost(request, replica, at)
        self._shared.publish_loss(replica, request, at)
        self.some = True

    def lost_elsewhere(self, request: int, replica: int, at: float) -> None:
        """Another worker of the host lost a request."""
        self._suspects.lost(request, replica, at)
        self.some = True

    def ended_early(self, request: int, replica: int, at: float, *, hung: bool) -> None:
        """Its client left, or the replica gave no sign of life (``hung``), and may die a moment later."""
        self._ended.append((request, replica, at + (HUNG_S if hung else SAME_DEATH_S)))

    def died(self, model: str, replica: int, at: float) -> None:
        self._suspects.died(model, replica, at)
        for _ in range(len(self._ended)):
            request, where, until = self._ended.popleft()
            if where != replica:
                self._ended.append((request, where, until))
            elif at <= until:
                self.lost(request, replica, at)

    def served(self, request: int, at: float) -> None:
        self._suspects.served(request, at)

    def excused(self, request: int, at: float) -> bool:
        """Whether it was lost with replicas that died together with others, so that it did not end them."""
        return self._suspects.excused(request, at)

    def begin(self, request: int, at: float) -> bool:
        """Whether it may be sent only once, and :meth:`end` must follow; raises its refusal if it may not.

        Of the requests that must run alone one does, in this worker.
        """
        suspicion = self._suspects.suspicion(request, at)
        self.some = len(self._suspects) > 0
        if suspicion is SuspectRestriction.NONE:
            return False
        if suspicion is SuspectRestriction.GUILTY:
            raise Refused(
                Refusal.REPLICA_LOST,
                "Two engines died while they served this request. It is refused for some minutes.",
                final=True,
            )
        if self._one_runs:
            raise Refused(
                Refusal.OVERLOADED,
                "Engines died while they served this request and others: they are tried one by one.",
                retry_after_s=AGAIN_S,
            )
        self._one_runs = True
        return True

    def end(self) -> None:
        """The request that ran alone has ended."""
        self._one_runs = False
