"""The price of an answer, in integers: sums over any number of answers are exact, in whatever order.

Costs are nano-units of the currency of the prices, rates pico-units a token: a price per million tokens of
0.000001 is a rate of 1.
"""

from __future__ import annotations

from typing import Final

from policy.config.tenancy import TokenPrice

NANO: Final = 1_000_000_000
_PICO_A_TOKEN: Final = 1_000_000
_PICO_A_NANO: Final = 1000


class TokenRates:
    """What a token costs in pico-units: of a prompt, of a prompt in the prefix cache, of an answer."""

    __slots__ = ("cached", "output", "prompt")

    def __init__(self, prompt: int, cached: int, output: int) -> None:
        self.prompt = prompt
        self.cached = cached
        self.output = output

    def cost(self, prompt: int, cached: int, output: int) -> int:
        """The cost in nano-units, rounded half up; ``prompt`` includes the ``cached`` tokens."""
        pico = (prompt - cached) * self.prompt + cached * self.cached + output * self.output
        return (pico + _PICO_A_NANO // 2) // _PICO_A_NANO


FREE = TokenRates(0, 0, 0)


def rates_of(price: TokenPrice | None, *, batch: bool = False) -> TokenRates:
    """The rates of a model with this price, for requests of priority ``batch`` or another."""
    if price is None:
        return FREE
    part = price.batch if batch else 1.0
    cached = price.input if price.cached_input is None else price.cached_input
    return TokenRates(_rate(part * price.input), _rate(part * cached), _rate(part * price.output))


def _rate(price: float) -> int:
    return round(price * _PICO_A_TOKEN)
