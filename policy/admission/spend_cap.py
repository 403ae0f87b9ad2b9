"""How much money may still be spent in an hour: reserved before a request, settled by what it used."""

from __future__ import annotations

from dataclasses import dataclass

from policy.config.deployment import Price

HOUR_S = 3600.0
# Money comes back a slot at a time, an hour after the slot has ended.
SLOTS = 60
_SLOT_S = HOUR_S / SLOTS
_TOKENS_PER_PRICE = 1_000_000


def cost(price: Price, prompt_tokens: int, output_tokens: int) -> float:
    """What so many tokens cost, in the currency of ``price``."""
    return (price.input * prompt_tokens + price.output * output_tokens) / _TOKENS_PER_PRICE


@dataclass(slots=True, eq=False)
class Reservation:
    """Money that is set aside for one request until it is settled."""

    amount: float
    settled: bool = False


class SpendCap:
    """What one worker may spend at one upstream: at most ``cap`` in any hour, what is held included.

    A bucket that refills evenly would let twice its size out in an hour that begins with a full one;
    this one counts what was spent in the last hour. More than ``cap`` leaves only when requests use
    more than was held for them, by that difference. Instants are seconds of one monotonic clock.
    """

    def __init__(self, cap: float) -> None:
        self.cap = cap
        self.held = 0.0
        self._slot = 0
        self._spent = [0.0] * (SLOTS + 1)

    def spent(self, at: float) -> float:
        """What was spent in the hour before ``at``, to the slot."""
        self._advance(at)
        return sum(self._spent)

    def hold(self, amount: float, at: float) -> Reservation | None:
        """Set ``amount`` aside; ``None`` when that would pass the cap."""
        if self.spent(at) + self.held + amount > self.cap:
            return None
        self.held += amount
        return Reservation(amount)

    def settle(self, hold: Reservation, amount: float, at: float) -> None:
        """``hold`` has become ``amount``; settling again changes nothing."""
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
