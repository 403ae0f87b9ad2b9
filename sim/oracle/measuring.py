"""What one replica attains: the highest rate at which enough requests are within the objectives, as tried.

The engine model's ``mu`` is one of means, which hide that requests come in bursts and differ in length. A
plan made with it would miss what it promises. So the oracle's is found by trying rates on a fleet of a fixed
size, large enough (about ten replicas) that the bursts of single requests are shared as in the runs that are
judged.
"""

from __future__ import annotations

from collections.abc import Callable


def rate_attaining(
    run: Callable[[float], float], low: float, high: float, attainment: float, precision: float = 0.01
) -> float:
    """The highest rate per replica at which ``run(rate)`` is at least ``attainment``, in requests per second.

    By bisection between ``low`` and ``high``; the rate returned has been tried, and one that is ``precision``
    (a fraction of it) higher has failed. The lower the rate, the longer a run: ``low`` itself is tried last,
    where all rates down to twice it have failed. Raises :class:`ValueError` where the edge is not between
    the two.
    """
    if not 0 < low < high or precision <= 0:
        raise ValueError(
            f"rates from {low:g} to {high:g} by {precision:g}: expected 0 < low < high, and 0 < precision"
        )
    if (shown := run(high)) >= attainment:
        raise ValueError(
            f"still at {high:g} requests per second {shown:.4g} attain, expected under {attainment:g}"
        )
    attains = False  # whether low is known to
    while not attains or high - low > precision * low:
        rate = (low + high) / 2 if attains or high > 2 * low else low
        if (shown := run(rate)) >= attainment:
            low, attains = rate, True
        elif rate > low:
            high = rate
        else:
            raise ValueError(
                f"already at {low:g} requests per second {shown:.4g} attain, expected {attainment:g}"
            )
    return low
