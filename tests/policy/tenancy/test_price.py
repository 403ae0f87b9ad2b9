"""Costs are exact integers: by token, by part of the prompt, and by priority."""

from __future__ import annotations

import pytest

from policy.config.tenancy import TokenPrice
from policy.tenancy.price import NANO, rates_of


@pytest.mark.parametrize(
    ("price", "batch", "tokens", "cost"),
    [
        (None, False, (10, 0, 10), 0.0),
        (TokenPrice(input=2.0, output=8.0), False, (1_000_000, 0, 1_000_000), 10.0),
        (TokenPrice(input=2.0, output=8.0), False, (1_000_000, 400_000, 0), 2.0),
        (TokenPrice(input=2.0, cached_input=0.5, output=8.0), False, (1_000_000, 400_000, 0), 1.4),
        (TokenPrice(input=2.0, output=8.0, batch=0.5), True, (1_000_000, 0, 500_000), 3.0),
        (TokenPrice(input=2.0, output=8.0, batch=0.5), False, (1_000_000, 0, 500_000), 6.0),
        (TokenPrice(input=0.15, output=0.6), False, (1, 0, 1), 0.75e-6),
        (TokenPrice(input=0.0001, output=0), False, (4, 0, 0), 0.0),
        (TokenPrice(input=0.0001, output=0), False, (5, 0, 0), 1e-9),
    ],
)
def test_a_cost_is_a_sum_of_tokens_by_price(
    price: TokenPrice | None, batch: bool, tokens: tuple[int, int, int], cost: float
) -> None:
    assert rates_of(price, batch=batch).cost(*tokens) == round(cost * NANO)
