"""A spend cap per hour: money is reserved before a request and settled by its usage."""

from __future__ import annotations

from dataclasses import dataclass

from policy.config.deployment import Price

HOUR_S = 3600.0
# The hour is counted in slots: what was spent in one is forgotten an hour after its end.
SLOTS = 60
_SLOT_S = HOUR_S / SLOTS
_TOKENS_PER_PRICE = 1_000_000


def cost(price: Price, prompt_tokens: int, output_tokens: int) -> float:
    """The cost of so many tokens, in the currency of ``price``."""
    return (price.input * prompt_tokens + price.output * output_tokens) / _TOKENS_PER_PRICE


@dataclass(slots=True, eq=False)
class Reservation:
    """Money reserved for one request until it is settled."""

    amount: float
    settled: bool = False


class SpendCap:
    """The spending of one worker at one fallback provider: at most ``cap`` in any hour, reservations
    included.

    A token bucket would allow twice its size in an hour that begins with a full bucket; this counts the
    spending of the last hour. The cap is exceeded only by what requests use beyond their reservations.
    Instants are seconds of one monotonic clock.
    """

    def __init__(self, cap: float) -> None:
        self.cap = cap
        self.held = 0.0
        self._slot = 0
        self._spent = [0.0] * (SLOTS + 1)

    def spent(self, at: float) -> float:
        """The spending in the hour before ``at``, to the slot."""
        self._advance(at)
        return sum(self._spent)

    def hold(self, amount: float, at: float) -> Reservation | None:
        """Reserve ``amount``; ``None`` when that would exceed the cap."""
        if self.spent(at) + self.held + amount > self.cap:
            return None
        self.held += amount
        return Reservation(amount)

    def settle(self, hold: Reservation, amount: float, at: float) -> None:
        """Replace the reservation by the spent ``amount``; a second call does nothing."""
        if hold.settled:
            return
        hold.settled = True
        # Sums of many small amounts drift; what is held is never less than nothing.
        self.held = max(0.0, self.held - hold.amount)
        self._advance(at)
        self._spent[self._slot % len(self._spent)] += amount

    def _advance(self, at: float) -> None:
        now = int(at / _SLOT_S)
        # The slot in progress and those that ended within the hour.
        for slot in range(max(self._slot + 1, now - SLOTS), now + 1):
            self._spent[slot % len(self._spent)] = 0.0
        self._slot = max(self._slot, now)
