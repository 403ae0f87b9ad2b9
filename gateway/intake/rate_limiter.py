"""The limits of tenants and keys, checked when a request comes and settled when it ends.

A request must be within its key's and its tenant's limits. It reserves first and looks then, so that of two
workers at the boundary at least one sees the other; what is over is withdrawn. It never waits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable
from math import inf
from typing import Any, Final

from gateway.intake.limit_headers import (
    REQUESTS_HEADERS,
    TOKENS_HEADERS,
    Headers,
    duration,
    rate_limit_headers,
)
from gateway.intake.limit_state import NANO, LimitReservation, LimitState
from gateway.intake.principal import LimitSubject, Principal
from gateway.intake.shared_limits import SharedLimits
from gateway.protocol.errors import MAX_RETRY_AFTER_S, Refused
from policy.config.tenancy import LimitName
from policy.errors import Refusal
from policy.tenancy.token_bucket import PERIOD_S, TokenBucket

# A view that was not used for so long is made anew, from what the other workers saw last.
FORGET_S: Final = PERIOD_S
# Views that are brought up to date in one turn of the event loop, and seconds after which it ends earlier: a
# look reads the counts of all other workers.
LOOKS_A_TURN: Final = 256
LOOKS_S: Final = 0.002
# Keys whose limits are described in one turn, each with those of its tenant.
DESCRIBED_A_TURN: Final = 64


class RequestReservation:
    """What a request has reserved. ``headers`` show the tighter of the limits of its key and its tenant."""

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float], nano: int) -> None:
        self._clock = clock
        self._wall = wall
        self._nano = nano
        self._settled = False
        self.held: list[LimitReservation] = []
        self.headers: Headers = []

    def settle(self, tokens: int, nano: int, *, began: bool) -> None:
        """The request has ended, having used these tokens and money; only the first call counts.

        ``began``: it was sent to a replica. Otherwise it counts as no request.
        """
        if not self._settled:
            self._settled = True
            now, wall = self._clock(), self._wall()
            for held in self.held:
                held.state.settle(
                    held, self._nano, tokens=tokens, spent=nano, began=began, now=now, wall=wall
                )


class RateLimiter:
    """The limits in one worker. ``clock`` is the host's monotonic clock; ``wall`` ends periods of budgets."""

    def __init__(
        self,
        shared: SharedLimits,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._shared = shared
        self._clock = clock
        self._wall = wall
        self._states: dict[int, LimitState] = {}
        self._due: list[LimitState] = []

    def admit(self, principal: Principal, tokens: int, nano: int) -> RequestReservation:
        """Reserve for a request that may use ``tokens`` tokens and ``nano`` nano-units of money.

        Raises :class:`gateway.protocol.errors.Refused` with the limit that it is over.
        """
        now = self._clock()
        reservation = RequestReservation(self._clock, self._wall, nano)
        holds = reservation.held
        for subject in principal.limited:
            holds.append(self._state(subject, now).reserve(tokens, nano, now))
        refused: Refused | None = None
        longest_s = -1.0
        for held in holds:
            state = held.state
            state.look(now)
            for limit, wait_s in self._over(held, nano):
                enforced = limit not in state.dry_run
                whose = "key" if state.subject.is_key else "tenant"
                outcome = "refused" if enforced else "dry_run"
                principal.account.counters.exceeded[limit.value, whose, outcome] += 1
                if not enforced:
                    state.ignore(held, limit)
                elif wait_s > longest_s:
                    longest_s, refused = wait_s, refusal(state.subject, limit, wait_s)
        if refused is not None:
            for held in holds:
                held.state.withdraw(held, nano)
            refused.limits = self._headers(holds, True)
            raise refused
        for held in holds:
            held.state.report()
        reservation.headers = self._headers(holds, False)
        return reservation

    def beat(self) -> None:
        """Report that this worker lives, and look at some of the limits in use, each in its turn."""
        self._shared.beat()
        now = self._clock()
        if not self._due:
            self._due = list(self._states.values())
        looks = 0
        for state in self._due[:LOOKS_A_TURN]:
            looks += 1
            if not self._is_forgotten(state, now):
                state.look(now)
                state.report()
            elif self._states.get(state.subject.key) is state:
                del self._states[state.subject.key]
            if self._clock() > now + LOOKS_S:
                break
        del self._due[:looks]

    def states(self) -> Collection[LimitState]:
        """The limits that requests of this worker named lately."""
        return self._states.values()

    def close(self) -> None:
        self._shared.close()

    async def in_use(self, principals: Iterable[Principal]) -> list[dict[str, Any]]:
        """The tenants and keys of ``principals`` that this host was asked for in the last minute.

        They are described over several turns of the event loop: there may be thousands.
        """
        since = self._clock() - FORGET_S
        asked = {key for key, (_, at) in self._shared.asked().items() if at > since}
        described: list[dict[str, Any]] = []
        for looks, who in enumerate(principals, 1):
            for each in who.limited:
                if each.key in asked:
                    asked.remove(each.key)
                    of = "key" if each.is_key else "tenant"
                    described.append({"of": of, "name": each.name, "limits": self.describe(each)})
            if looks % DESCRIBED_A_TURN == 0:
                await asyncio.sleep(0)
        return described

    def describe(self, subject: LimitSubject) -> dict[str, Any]:
        """How much of its limits a tenant or key uses on this host, by the limit."""
        now = self._clock()
        state = self._states.get(subject.key) or LimitState(subject, self._shared, now, counts=False)
        state.look(now)
        share, found = state.share, dict[str, dict[str, Any]]()
        for limit, bucket in ((LimitName.REQUESTS, state.requests), (LimitName.TOKENS, state.tokens)):
            if bucket is not None:
                found[limit] = {
                    "limit": int(bucket.limit),
                    "remaining": max(0, int(bucket.level)),
                    "share": share,
                }
        if state.parallel:
            found[LimitName.PARALLEL] = {
                "limit": state.parallel,
                "running": state.slot.all_running,
                "share": share,
            }
        if state.budget >= 0:
            spent, wait_s = self._spent(state)
            found[LimitName.BUDGET] = {
                "limit": state.budget / NANO,
                "spent": spent / NANO,
                "period_ends_in_s": None if wait_s == inf else wait_s,
            }
        for name, entry in found.items():
            entry["dry_run"] = name in state.dry_run
        return found

    def _state(self, subject: LimitSubject, now: float) -> LimitState:
        state = self._states.get(subject.key)
        if state is None or self._is_forgotten(state, now):
            state = self._states[subject.key] = LimitState(subject, self._shared, now)
        elif state.access is not subject.access:
            state.read(subject, now)
        return state

    def _is_forgotten(self, state: LimitState, now: float) -> bool:
        if state.asked_at + FORGET_S < now and not state.slot.running:
            return True
        return not self._shared.holds(state.slot)

    def _over(self, held: LimitReservation, nano: int) -> list[tuple[LimitName, float]]:
        """The limits that the newest request is over, and how long each has to be waited for."""
        state = held.state
        found = state.over(held)
        if state.budget >= 0:
            spent, wait_s = self._spent(state)
            if spent + state.slot.all_open - nano >= state.budget:
                found.append((LimitName.BUDGET, wait_s))
        return found

    def _spent(self, state: LimitState) -> tuple[int, float]:
        """What was spent in this period, and how many seconds it lasts."""
        wall = self._wall()
        known = self._shared.spent_elsewhere(state.slot)
        if known is not None:
            nano, end = known
            if wall < end:
                return state.slot.all_spent + nano, end - wall
        # The ledger has not said anything of this period yet.
        begin, end = state.period(wall)
        return self._shared.spent_since(state.slot, int(begin)), end - wall

    def _headers(self, holds: list[LimitReservation], withdrawn: bool) -> Headers:
        """The headers of the tightest enforced limit of each kind."""
        requests: TokenBucket | None = None
        tokens: TokenBucket | None = None
        requests_left = tokens_left = 0.0
        for held in holds:
            state = held.state
            bucket = state.requests
            if bucket is not None and state.shows_requests:
                left = bucket.level + (held.requests if withdrawn else 0)
                if requests is None or left < requests_left:
                    requests, requests_left = bucket, left
            bucket = state.tokens
            if bucket is not None and state.shows_tokens:
                left = bucket.level + (held.tokens if withdrawn else 0)
                if tokens is None or left < tokens_left:
                    tokens, tokens_left = bucket, left
        found: Headers = []
        if requests is not None:
            found += rate_limit_headers(REQUESTS_HEADERS, requests.limit, requests_left)
        if tokens is not None:
            found += rate_limit_headers(TOKENS_HEADERS, tokens.limit, tokens_left)
        return found


def refusal(subject: LimitSubject, limit: LimitName, wait_s: float) -> Refused:
    """The refusal of a request that is over ``limit``."""
    whose = f"API key '{subject.name}'" if subject.is_key else f"tenant '{subject.name}'"
    value = getattr(subject.access, limit.value)
    when = f" Try again in {duration(wait_s)}." if wait_s < inf else ""
    return Refused(
        Refusal.RATE_LIMITED,
        f"Rate limit reached for {whose}: {limit.value} is {_WORDS[limit].format(value)}.{when}",
        retry_after_s=wait_s,
        # No client should wait for it within the request.
        final=wait_s > MAX_RETRY_AFTER_S,
    )


_WORDS: Final = {
    LimitName.REQUESTS: "{} requests per minute",
    LimitName.TOKENS: "{} tokens per minute",
    LimitName.PARALLEL: "{} requests at a time",
    LimitName.BUDGET: "{:g}, and it is spent",
}
