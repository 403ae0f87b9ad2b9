"""SLO attainment of a run, and the sums behind its means and rates."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from math import inf
from typing import Any

from policy.stats.histogram import GAPS, SECONDS


@dataclass(frozen=True, slots=True)
class RequestMeasurement:
    """One finished request; ``error`` is empty for a success, ``aborted`` means that the client left.

    ``ttft_s`` is ``None`` for an answer that was not streamed, ``itl_s`` is the mean time per token after the
    first, ``gap_s`` the mean gap between events, ``gaps`` are the seconds between reads.
    """

    user: str
    e2e_s: float
    ttft_s: float | None = None
    itl_s: float = 0.0
    gap_s: float = 0.0
    gaps: tuple[float, ...] = ()
    prompt_tokens: int = 0
    tokens: int = 0
    error: str = ""
    aborted: bool = False


@dataclass(frozen=True, slots=True)
class RequestSlo:
    """The SLO of a request, in seconds."""

    ttft_s: float
    itl_s: float

    def met(self, outcome: RequestMeasurement) -> bool:
        """Whether a request met the SLO.

        A stream must meet both limits. An answer in one piece must arrive before a stream at both
        limits would end.
        """
        if outcome.error or outcome.aborted:
            return False
        if outcome.ttft_s is None:
            return outcome.e2e_s <= self.ttft_s + self.itl_s * max(outcome.tokens - 1, 0)
        return outcome.ttft_s <= self.ttft_s and outcome.itl_s <= self.itl_s


@dataclass(slots=True)
class UserStatistics:
    """Sums of one kind of user. ``requests`` were ended by the server, ``served`` ones successfully.

    Times are sums in seconds: ``ttft_s`` over ``begun`` streams, ``itl_s`` over ``gaps`` gaps, ``e2e_s`` over
    ``served`` requests. ``streams`` are served streams by the gateway's buckets of TTFT and mean gap.
    """

    requests: int = 0
    served: int = 0
    aborted: int = 0
    met: int = 0
    begun: int = 0
    gaps: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    ttft_s: float = 0.0
    itl_s: float = 0.0
    e2e_s: float = 0.0
    # By text: what is sent between processes has no other keys.
    streams: dict[str, int] = field(default_factory=dict)

    def add(self, outcome: RequestMeasurement, objective: RequestSlo) -> None:
        """Count a request that ended; its first event was counted before."""
        self.gaps += len(outcome.gaps)
        self.itl_s += sum(outcome.gaps)
        self.aborted += outcome.aborted
        self.requests += not outcome.aborted
        if outcome.error or outcome.aborted:
            return
        self.served += 1
        self.e2e_s += outcome.e2e_s
        self.prompt_tokens += outcome.prompt_tokens
        self.tokens += outcome.tokens
        self.met += objective.met(outcome)
        if outcome.ttft_s is not None:
            key = f"{bisect_left(SECONDS, outcome.ttft_s)} {bisect_left(GAPS, outcome.gap_s)}"
            self.streams[key] = self.streams.get(key, 0) + 1

    def merge(self, other: UserStatistics) -> None:
        """Add another's sums."""
        for each in fields(self):
            if each.name != "streams":
                setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))
        for key, count in other.streams.items():
            self.streams[key] = self.streams.get(key, 0) + count

    def streams_by_bucket(self) -> Iterator[tuple[float, float, int]]:
        """Served streams by the upper bounds of their buckets of TTFT and mean gap."""
        for key, count in self.streams.items():
            ttft, gap = map(int, key.split())
            yield (*SECONDS, inf)[ttft], (*GAPS, inf)[gap], count

    @property
    def attainment(self) -> float:
        """The fraction of requests that met the SLO, 0 without requests; failures do not meet it."""
        return self.met / self.requests if self.requests else 0.0


@dataclass(slots=True)
class RunStatistics:
    """A run: tallies by kind of user, and the time it covers, in seconds of one process's steady clock."""

    tallies: dict[str, UserStatistics] = field(default_factory=dict)
    began_at: float = 0.0
    ended_at: float = 0.0

    def of(self, user: str) -> UserStatistics:
        """The tally of a kind of user."""
        return self.tallies.setdefault(user, UserStatistics())

    def begin(self, at: float) -> None:
        """Reset; the run begins ``at``."""
        self.tallies.clear()
        self.began_at = self.ended_at = at

    def first_event(self, user: str, ttft_s: float) -> None:
        """Count the first event of a stream, also if the stream fails later."""
        tally = self.of(user)
        tally.begun += 1
        tally.ttft_s += ttft_s

    def end(self, outcome: RequestMeasurement, objective: RequestSlo, at: float) -> None:
        """Count a request that ended ``at``."""
        self.of(outcome.user).add(outcome, objective)
        self.ended_at = max(self.ended_at, at)

    def total(self) -> UserStatistics:
        """All kinds of users together."""
        total = UserStatistics()
        for tally in self.tallies.values():
            total.merge(tally)
        return total

    @property
    def seconds(self) -> float:
        """From the beginning to the end of the last request."""
        return self.ended_at - self.began_at

    def take(self) -> dict[str, Any]:
        """The counts since the last call, as plain data for another process."""
        sums_by_name = {name: asdict(tally) for name, tally in self.tallies.items()}
        self.tallies.clear()
        return sums_by_name

    def put(self, sums_by_name: Mapping[str, Any], at: float) -> None:
        """Add the counts of another process, received ``at`` by the clock of this process."""
        for name, sums in sums_by_name.items():
            self.of(name).merge(UserStatistics(**sums))
            self.ended_at = max(self.ended_at, at)
