"""The limits of tenants and keys, checked when a request comes and settled when it ends.

A request must be within its key's and its tenant's limits. It reserves first and looks then, so that of two
workers at the boundary at least one sees the other; what is over is withdrawn. It never waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf
from typing import Any, Final

from gateway.intake.limit_headers import Headers, duration, rate_limit_headers
from gateway.intake.principal import Principal, Subject
from gateway.intake.shared_limits import (
    ASKED,
    ASKED_AT,
    OPEN,
    REQUESTS,
    REQUESTS_BACK,
    REQUESTS_FULL_AT,
    RUNNING,
    SPENT,
    TOKENS,
    TOKENS_BACK,
    TOKENS_FULL_AT,
    SharedLimits,
    Slot,
    Sums,
)
from gateway.protocol.errors import MAX_RETRY_AFTER_S, Refused
from policy.config.tenancy import Access, Limit
from policy.errors import Refusal
from policy.tenancy.token_bucket import PERIOD_S, TokenBucket, level_of

NANO: Final = 1_000_000_000
# A view that was not used for so long is made anew, from what the other workers saw last.
FORGET_S: Final = PERIOD_S
# Views that are brought up to date in one turn of the event loop.
LOOKS_A_TURN: Final = 256
# A request may end at any moment.
PARALLEL_WAIT_S: Final = 1.0


class LimitState:
    """A tenant's or key's use of its limits as this worker sees it; -1 and 0 stand for limits not set."""

    def __init__(self, subject: Subject, slot: Slot) -> None:
        self.subject = subject
        self.access: Access | None = None
        self.slot = slot
        self.asked_at = 0.0
        self.running = 0
        self.share = 1.0
        self.requests: TokenBucket | None = None
        self.tokens: TokenBucket | None = None
        self.parallel = 0
        self.budget = -1
        self.dry_run: tuple[Limit, ...] = ()
        self.sums = Sums()


class Held:
    """What one request has reserved of one tenant's or key's limits."""

    def __init__(self, state: LimitState, tokens: int) -> None:
        self.state = state
        self.requests = 0 if state.requests is None else 1
        self.tokens = 0 if state.tokens is None else tokens


class Reservation:
    """What a request has reserved. ``headers`` show the tighter of the limits of its key and its tenant."""

    def __init__(self, limiter: RateLimiter, nano: int) -> None:
        self._limiter = limiter
        self._nano = nano
        self._settled = False
        self.held: list[Held] = []
        self.headers: Headers = []

    def settle(self, tokens: int, nano: int, *, began: bool) -> None:
        """The request has ended, having used these tokens and money; only the first call counts.

        ``began``: it was sent to a replica. Otherwise it counts as no request.
        """
        if not self._settled:
            self._settled = True
            for held in self.held:
                self._limiter.settle(held, self._nano, tokens=tokens, spent=nano, began=began)


class RateLimiter:
    """The limits in one worker. ``clock`` is the host's monotonic clock; ``wall`` ends periods of budgets.

    ``exceeded`` counts the requests that were over a limit: by tenant, limit, whether it is of the ``tenant``
    or the ``key``, and whether they were ``refused`` or it is in ``dry_run``.
    """

    def __init__(
        self,
        shared: SharedLimits,
        exceeded: Callable[[str, tuple[str, str, str]], None] = lambda tenant, labels: None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._shared = shared
        self._exceeded = exceeded
        self._clock = clock
        self._wall = wall
        self._states: dict[int, LimitState] = {}
        # What this host had spent when a period began of which the ledger said nothing yet, with its end.
        self._spent_before: dict[int, tuple[float, int]] = {}
        self._due: list[LimitState] = []

    def admit(self, principal: Principal, tokens: int, nano: int) -> Reservation:
        """Reserve for a request that may use so many tokens and nano-units of money.

        Raises :class:`gateway.protocol.errors.Refused` with the limit that it is over.
        """
        now = self._clock()
        reservation = Reservation(self, nano)
        for subject in principal.limited:
            state = self._state(subject, now)
            # More than the limit could never be admitted.
            most = tokens if state.tokens is None else min(tokens, int(state.tokens.limit))
            held = Held(state, most)
            self._reserve(held, nano, now)
            reservation.held.append(held)
        refused: Refused | None = None
        longest_s = -1.0
        for held in reservation.held:
            self._look(held.state, now)
            for limit, wait_s in self._over(held, nano):
                state = held.state
                enforced = limit not in state.dry_run
                mode, whose = (
                    "refused" if enforced else "dry_run",
                    "key" if state.subject.is_key else "tenant",
                )
                self._exceeded(principal.account.name, (limit.value, whose, mode))
                if not enforced:
                    self._pass(held, limit)
                elif wait_s > longest_s:
                    longest_s, refused = wait_s, refusal(state.subject, limit, wait_s)
        for held in reservation.held:
            if refused is None:
                self._report(held.state, now, 0, 0)
            else:
                self._withdraw(held, nano, now)
        reservation.headers = self._headers(reservation.held, refused is not None)
        if refused is not None:
            refused.limits = reservation.headers
            raise refused
        return reservation

    def settle(self, held: Held, nano: int, *, tokens: int, spent: int, began: bool) -> None:
        """A request has ended: it used ``tokens`` and ``spent`` money, on a replica if ``began``."""
        state = held.state
        shared, slot = self._shared, state.slot
        if not shared.holds(slot):
            return
        now = self._clock()
        self._look(state, now)
        tokens_back = requests_back = 0
        bucket = state.tokens
        if bucket is not None and held.tokens:
            tokens_back = held.tokens - tokens
            if tokens_back < 0:
                shared.add(slot, TOKENS, -tokens_back)
            else:
                tokens_back = int(bucket.refundable(float(tokens_back)))
                shared.add(slot, TOKENS_BACK, tokens_back)
        bucket = state.requests
        if bucket is not None and held.requests and not began:
            requests_back = round(bucket.refundable(1.0))
            shared.add(slot, REQUESTS_BACK, requests_back)
        self._report(state, now, requests_back, tokens_back)
        if state.budget >= 0:
            shared.add(slot, SPENT, spent)
        shared.add(slot, OPEN, -nano)
        shared.add(slot, RUNNING, -1)
        state.running -= 1

    def beat(self) -> None:
        """Report that this worker lives, and look at some of the limits in use, each in its turn."""
        self._shared.beat()
        now = self._clock()
        if not self._due:
            self._due = list(self._states.values())
        for state in self._due[:LOOKS_A_TURN]:
            if (state.asked_at + FORGET_S >= now or state.running) and self._shared.holds(state.slot):
                self._look(state, now)
                self._report(state, now, 0, 0)
            elif self._states.get(state.subject.key) is state:
                del self._states[state.subject.key]
        del self._due[:LOOKS_A_TURN]

    def close(self) -> None:
        self._shared.close()

    def describe(self, subject: Subject) -> dict[str, Any]:
        """How much of its limits a tenant or key uses on this host, by the limit."""
        now = self._clock()
        state = self._states.get(subject.key) or self._open(subject, now)
        self._look(state, now)
        share, found = state.share, dict[str, dict[str, Any]]()
        for limit, bucket in ((Limit.REQUESTS, state.requests), (Limit.TOKENS, state.tokens)):
            if bucket is not None:
                found[limit] = {"limit": int(bucket.limit), "remaining": int(bucket.level), "share": share}
        if state.parallel:
            found[Limit.PARALLEL] = {"limit": state.parallel, "running": state.sums.running, "share": share}
        if state.budget >= 0:
            spent, wait_s = self._spent(state)
            found[Limit.BUDGET] = {
                "limit": state.budget / NANO,
                "spent": spent / NANO,
                "period_ends_in_s": None if wait_s == inf else wait_s,
            }
        for name, entry in found.items():
            entry["dry_run"] = name in state.dry_run
        return found

    def _state(self, subject: Subject, now: float) -> LimitState:
        state = self._states.get(subject.key)
        forgotten = state is not None and state.asked_at + FORGET_S < now and not state.running
        if state is None or forgotten or not self._shared.holds(state.slot):
            state = self._states[subject.key] = self._open(subject, now)
        elif state.access is not subject.access:
            self._read(state, subject, now)
        state.asked_at = now
        return state

    def _open(self, subject: Subject, now: float) -> LimitState:
        """A view with the levels that another worker, or the one before this, saw last."""
        state = LimitState(subject, self._shared.open(subject.key))
        state.share, full = self._shared.lease(state.slot, now)
        state.sums = sums = self._shared.sums(state.slot)
        self._read(state, subject, now)
        if state.share < 1.0 and not full:  # nobody here used it: what others left is not known yet
            if state.requests is not None and not sums.requests_full_at:
                state.requests.level = 0.0
            if state.tokens is not None and not sums.tokens_full_at:
                state.tokens.level = 0.0
        return state

    def _read(self, state: LimitState, subject: Subject, now: float) -> None:
        """Take the limits as they are configured now; what was used of them stays used."""
        access, share, sums = subject.access, state.share, state.sums
        state.subject, state.access, state.dry_run = subject, access, access.dry_run
        state.requests = _bucket(state.requests, access.rpm_limit, share, sums.requests_full_at, now)
        state.tokens = _bucket(state.tokens, access.tpm_limit, share, sums.tokens_full_at, now)
        state.parallel = access.max_parallel_requests or 0
        state.budget = -1 if access.max_budget is None else round(access.max_budget * NANO)

    def _reserve(self, held: Held, nano: int, now: float) -> None:
        shared, state = self._shared, held.state
        slot = state.slot
        if held.requests:
            shared.add(slot, REQUESTS, 1)
        if held.tokens:
            shared.add(slot, TOKENS, held.tokens)
        shared.add(slot, OPEN, nano)
        shared.add(slot, RUNNING, 1)
        shared.add(slot, ASKED, 1)
        shared.put(slot, ASKED_AT, int(now * 1e9))
        state.running += 1

    def _pass(self, held: Held, limit: Limit) -> None:
        """A limit in dry run is exceeded: what it would have refused is not taken from it."""
        if limit is Limit.REQUESTS:
            self._shared.add(held.state.slot, REQUESTS_BACK, held.requests)
            held.requests = 0
        elif limit is Limit.TOKENS:
            self._shared.add(held.state.slot, TOKENS_BACK, held.tokens)
            held.tokens = 0

    def _withdraw(self, held: Held, nano: int, now: float) -> None:
        shared, slot = self._shared, held.state.slot
        if held.requests:
            shared.add(slot, REQUESTS_BACK, 1)
        if held.tokens:
            shared.add(slot, TOKENS_BACK, held.tokens)
        shared.add(slot, OPEN, -nano)
        shared.add(slot, RUNNING, -1)
        held.state.running -= 1
        self._report(held.state, now, held.requests, held.tokens)

    def _look(self, state: LimitState, now: float) -> None:
        """Take what all workers of the host counted since the last look."""
        shared, slot = self._shared, state.slot
        share, full = shared.lease(slot, now)
        if share != state.share:
            self._resize(state, share, full=full)
        state.sums = sums = shared.sums(slot)
        if (bucket := state.requests) is not None:
            bucket.observe(now, float(sums.requests), float(sums.requests_back))
        if (bucket := state.tokens) is not None:
            bucket.observe(now, float(sums.tokens), float(sums.tokens_back))

    def _report(self, state: LimitState, now: float, requests_back: int, tokens_back: int) -> None:
        """Report the levels to workers that look here for the first time, with what was refunded since."""
        shared, slot = self._shared, state.slot
        if (bucket := state.requests) is not None:
            full_at = now + bucket.full_in_s(float(requests_back))
            shared.put(slot, REQUESTS_FULL_AT, int(full_at * 1e9))
        if (bucket := state.tokens) is not None:
            full_at = now + bucket.full_in_s(float(tokens_back))
            shared.put(slot, TOKENS_FULL_AT, int(full_at * 1e9))

    def _resize(self, state: LimitState, share: float, *, full: bool) -> None:
        """The host's share has changed; ``full``: no host used the limit, so that its first share is full."""
        first = full and state.share == 0.0
        state.share = share
        for bucket in (state.requests, state.tokens):
            if bucket is not None:
                bucket.resize(bucket.limit, share)
                if first:
                    bucket.level = min(bucket.capacity, bucket.level + bucket.capacity)

    def _over(self, held: Held, nano: int) -> list[tuple[Limit, float]]:
        """The limits that the newest request is over, and how long each has to be waited for."""
        state, found = held.state, list[tuple[Limit, float]]()
        bucket = state.requests
        if bucket is not None and (wait_s := bucket.wait_s(1.0, 1.0)) > 0.0:
            found.append((Limit.REQUESTS, wait_s))
        bucket = state.tokens
        if bucket is not None and (wait_s := bucket.wait_s(float(held.tokens), float(held.tokens))) > 0.0:
            found.append((Limit.TOKENS, wait_s))
        if state.parallel and state.sums.running > max(1, int(state.parallel * state.share)):
            found.append((Limit.PARALLEL, PARALLEL_WAIT_S))
        if state.budget >= 0:
            spent, wait_s = self._spent(state)
            if spent + state.sums.open - nano >= state.budget:
                found.append((Limit.BUDGET, wait_s))
        return found

    def _spent(self, state: LimitState) -> tuple[int, float]:
        """What was spent in this period, and how many seconds it lasts."""
        spent, wall, end = state.sums.spent, self._wall(), -1.0
        known = self._shared.spent_elsewhere(state.slot)
        if known is not None:
            nano, end = known
            if wall < end:
                return spent + nano, end - wall
        # Without the ledger, or after the end of the period that it knows: what was spent here since.
        key = state.subject.key
        before = self._spent_before.get(key)
        if before is None or before[0] != end:
            before = self._spent_before[key] = end, spent
        return spent - before[1], inf

    def _headers(self, holds: list[Held], withdrawn: bool) -> Headers:
        """The headers of the tightest enforced limit of each kind."""
        requests: TokenBucket | None = None
        tokens: TokenBucket | None = None
        requests_left = tokens_left = 0.0
        for held in holds:
            state = held.state
            bucket = state.requests
            if bucket is not None and Limit.REQUESTS not in state.dry_run:
                left = bucket.level + (held.requests if withdrawn else 0)
                if requests is None or left < requests_left:
                    requests, requests_left = bucket, left
            bucket = state.tokens
            if bucket is not None and Limit.TOKENS not in state.dry_run:
                left = bucket.level + (held.tokens if withdrawn else 0)
                if tokens is None or left < tokens_left:
                    tokens, tokens_left = bucket, left
        found: Headers = []
        if requests is not None:
            found += rate_limit_headers(b"requests", requests.limit, requests_left)
        if tokens is not None:
            found += rate_limit_headers(b"tokens", tokens.limit, tokens_left)
        return found


def refusal(subject: Subject, limit: Limit, wait_s: float) -> Refused:
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
    Limit.REQUESTS: "{} requests per minute",
    Limit.TOKENS: "{} tokens per minute",
    Limit.PARALLEL: "{} requests at a time",
    Limit.BUDGET: "{:g}, and it is spent",
}


def _bucket(
    bucket: TokenBucket | None, limit: int | None, share: float, full_at: int, now: float
) -> TokenBucket | None:
    if limit is None:
        return None
    if bucket is not None:
        bucket.resize(float(limit), share)
        return bucket
    level = level_of(float(limit), share, max(0.0, full_at / 1e9 - now))
    return TokenBucket(float(limit), share, now, level)
