"""A spend cap per hour: money is reserved before a request and settled by its usage."""

from __future__ import annotations

from dataclasses import dataclass

from policy.config.deployment import ProviderPrice

HOUR_S = 3600.0
# The hour is counted in slots: what was spent in one is forgotten an hour after its end.
SLOTS = 60
_SLOT_S = HOUR_S / SLOTS
_TOKENS_PER_PRICE = 1_000_000


def cost(price: ProviderPrice, prompt_tokens: int, output_tokens: int) -> float:
    """The cost of the tokens, in the currency of ``price``."""
    return (price.input * prompt_tokens + price.output * output_tokens) / _TOKENS_PER_PRICE


@dataclass(slots=True, eq=False)
class SpendReservation:
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
        self._spent: dict[int, float] = {}

    def spent(self, at: float) -> float:
        """The spending in the hour before ``at``, to the slot."""
        oldest = int(at / _SLOT_S) - SLOTS
        self._spent = {slot: amount for slot, amount in self._spent.items() if slot >= oldest}
        return sum(self._spent.values())

    def hold(self, amount: float, at: float) -> SpendReservation | None:
        """Reserve ``amount``; ``None`` when that would exceed the cap."""
        if self.spent(at) + self.held + amount > self.cap:
            return None
        self.held += amount
        return SpendReservation(amount)

    def settle(self, hold: SpendReservation, amount: float, at: float) -> None:
        """Replace the reservation by the spent ``amount``; a second call does nothing."""
        if hold.settled:
            return
        hold.settled = True
        # Sums of many small amounts drift; what is held is never less than nothing.
        self.held = max(0.0, self.held - hold.amount)
        slot = int(at / _SLOT_S)
        self._spent[slot] = self._spent.get(slot, 0.0) + amount
