"""A tenant's or key's use of its limits, as one worker sees it."""

from __future__ import annotations

from typing import Final

from gateway.intake.principal import LimitSubject
from gateway.intake.shared_limits import SharedLimits
from policy.config.tenancy import AccessPolicy, LimitName
from policy.tenancy.budget_period import BudgetPeriod, period_of
from policy.tenancy.token_bucket import TokenBucket, level_of

NANO: Final = 1_000_000_000
# A request may end at any moment.
PARALLEL_WAIT_S: Final = 1.0
# A level that is older is brought up to date before a refund, of which a full bucket takes nothing.
FRESH_S: Final = 0.5
_NEVER: Final = BudgetPeriod(0.0, 0.0)


class LimitReservation:
    """What one request has reserved of one tenant's or key's limits."""

    def __init__(self, state: LimitState, tokens: int) -> None:
        self.state = state
        self.requests = 0 if state.requests is None else 1
        self.tokens = 0 if state.tokens is None else tokens


class LimitState:
    """The buckets and counts of one tenant or key; -1 and 0 stand for limits that are not set.

    ``shows_requests`` and ``shows_tokens``: clients are told what is left of limits that are enforced.

    At first the levels are those that another worker, or the one before this, saw last. One that does not
    count is only looked at. Instants are seconds of the monotonic clock.
    """

    def __init__(
        self, subject: LimitSubject, shared: SharedLimits, now: float, *, counts: bool = True
    ) -> None:
        self.subject = subject
        self._shared = shared
        self.slot = slot = shared.open(subject.key, counts=counts)
        self.asked_at = self._looked_at = now
        self.share, full = shared.lease(slot, now)
        self.requests: TokenBucket | None = None
        self.tokens: TokenBucket | None = None
        self.parallel = 0
        self.budget = -1
        self._period = _NEVER
        self.dry_run: tuple[LimitName, ...] = ()
        self.shows_requests = self.shows_tokens = False
        self.access: AccessPolicy | None = None
        self.read(subject, now)
        if self.share < 1.0 and not full:
            self._empty()

    def read(self, subject: LimitSubject, now: float) -> None:
        """Take the limits as they are configured now; what was used of them stays used."""
        access, share, slot = subject.access, self.share, self.slot
        self.subject, self.access, self.dry_run = subject, access, access.dry_run
        self.requests = _bucket(self.requests, access.rpm_limit, share, slot.seen_requests_full_at, now)
        self.tokens = _bucket(self.tokens, access.tpm_limit, share, slot.seen_tokens_full_at, now)
        self.parallel = access.max_parallel_requests or 0
        self.budget = -1 if access.max_budget is None else round(access.max_budget * NANO)
        self._period = _NEVER
        self.shows_requests = self.requests is not None and LimitName.REQUESTS not in access.dry_run
        self.shows_tokens = self.tokens is not None and LimitName.TOKENS not in access.dry_run

    def period(self, wall: float) -> BudgetPeriod:
        """The period of the budget that holds the instant ``wall`` (Unix seconds)."""
        period = self._period
        if not period.begin <= wall < period.end:
            period = self._period = period_of(self.subject.access.budget_duration, wall)
        return period

    def reserve(self, tokens: int, nano: int, now: float) -> LimitReservation:
        """Reserve for a request that may use ``tokens`` tokens and ``nano`` nano-units of money."""
        slot, bucket = self.slot, self.tokens
        # More than the limit could never be admitted.
        held = LimitReservation(self, tokens if bucket is None else min(tokens, int(bucket.limit)))
        slot.requests += held.requests
        slot.tokens += held.tokens
        slot.open += nano
        slot.running += 1
        slot.asked += 1
        slot.asked_at = int(now * 1e9)
        self.asked_at = now
        self._shared.write(slot)
        return held

    def look(self, now: float) -> None:
        """Take what all workers of the host counted since the last look."""
        shared, slot = self._shared, self.slot
        share, full = shared.lease(slot, now)
        if share != self.share:
            self._resize(share, full=full)
        shared.look(slot)
        self._looked_at = now
        if (bucket := self.requests) is not None:
            bucket.observe(now, float(slot.d_requests), float(slot.d_requests_back))
        if (bucket := self.tokens) is not None:
            bucket.observe(now, float(slot.d_tokens), float(slot.d_tokens_back))

    def withdraw(self, held: LimitReservation, nano: int) -> None:
        """The request is refused: nothing of it counts."""
        slot = self.slot
        slot.requests_back += held.requests
        slot.tokens_back += held.tokens
        slot.open -= nano
        slot.running -= 1
        self._set_levels()
        self._shared.write(slot)

    def settle(
        self,
        held: LimitReservation,
        nano: int,
        *,
        tokens: int,
        spent: int,
        began: bool,
        now: float,
        wall: float,
    ) -> None:
        """The request has ended: it used ``tokens`` and ``spent`` money, on a replica if it ``began``.

        ``wall`` is now in Unix seconds.
        """
        slot = self.slot
        if self._looked_at + FRESH_S < now:
            self.look(now)
        bucket = self.tokens
        if bucket is not None and held.tokens:
            unused = held.tokens - tokens
            if unused < 0:
                slot.tokens -= unused
            else:
                slot.tokens_back += int(bucket.refundable(float(unused), now))
        bucket = self.requests
        if bucket is not None and held.requests and not began:
            slot.requests_back += round(bucket.refundable(1.0, now))
        if self.budget >= 0:
            begin = int(self.period(wall).begin)
            if begin != slot.period_begin:
                slot.period_begin, slot.spent_before = begin, slot.spent
        slot.spent += spent
        slot.open -= nano
        slot.running -= 1
        self._set_levels()
        self._shared.write(slot)

    def ignore(self, held: LimitReservation, limit: LimitName) -> None:
        """A limit in dry run is exceeded: what it would have refused is not taken from it."""
        if limit is LimitName.REQUESTS:
            self.slot.requests_back += held.requests
            held.requests = 0
        elif limit is LimitName.TOKENS:
            self.slot.tokens_back += held.tokens
            held.tokens = 0
        self._shared.write(self.slot)

    def report(self) -> None:
        """Show the levels to workers that look here for the first time."""
        self._set_levels()
        self._shared.write_levels(self.slot)

    def over(self, held: LimitReservation) -> list[tuple[LimitName, float]]:
        """The limits, but for the budget, that the newest request is over, and the wait for each."""
        found: list[tuple[LimitName, float]] = []
        bucket = self.requests
        if bucket is not None and (wait_s := bucket.wait_s(1.0, 1.0)) > 0.0:
            found.append((LimitName.REQUESTS, wait_s))
        bucket = self.tokens
        if bucket is not None and (wait_s := bucket.wait_s(float(held.tokens), float(held.tokens))) > 0.0:
            found.append((LimitName.TOKENS, wait_s))
        if self.parallel and self.slot.all_running > max(1, int(self.parallel * self.share)):
            found.append((LimitName.PARALLEL, PARALLEL_WAIT_S))
        return found

    def _empty(self) -> None:
        """Begin with empty buckets where this host did not use them: what other hosts left is unknown."""
        slot = self.slot
        for bucket, seen in (
            (self.requests, slot.seen_requests_full_at),
            (self.tokens, slot.seen_tokens_full_at),
        ):
            if bucket is not None and not seen:
                bucket.level = min(0.0, bucket.level)

    def _set_levels(self) -> None:
        """When the buckets are full, as of the last look and what was refunded here since."""
        slot = self.slot
        if (bucket := self.requests) is not None:
            slot.requests_full_at = int((bucket.at + bucket.full_in_s(slot.requests_since)) * 1e9)
        if (bucket := self.tokens) is not None:
            slot.tokens_full_at = int((bucket.at + bucket.full_in_s(slot.tokens_since)) * 1e9)

    def _resize(self, share: float, *, full: bool) -> None:
        """The host's share has changed; ``full``: no host used the limit, so that its first share is full."""
        first = full and self.share == 0.0
        self.share = share
        for bucket in (self.requests, self.tokens):
            if bucket is not None:
                bucket.resize(bucket.limit, share)
                if first:
                    bucket.level = min(bucket.capacity, bucket.level + bucket.capacity)


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
