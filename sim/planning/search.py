"""The least count that will do, found with few tries of a count."""

from __future__ import annotations

from collections.abc import Callable

# More replicas do worse by chance alone, near the objective: so many counts below the least one are tried.
DEPTH = 2


def fewest(meets: Callable[[int], bool], guess: int, most: int) -> int | None:
    """The least count from 1 to ``most`` that ``meets``; ``None`` where ``most`` itself does not.

    It strides from ``guess`` until one count meets and a lower one does not, and halves what is between. The
    :data:`DEPTH` counts below the result do not meet. So it is what trying all of them from 1 up would find,
    also where the count above that one misses by chance.
    """
    known: dict[int, bool] = {}

    def tried(count: int) -> bool:
        if count not in known:
            known[count] = meets(count)
        return known[count]

    low, high = _bracket(tried, max(1, min(guess, most)), most)
    if high is None:
        return None
    while True:
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if tried(middle) else (middle, high)
        below = [count for count in range(max(1, high - DEPTH), high) if tried(count)]
        if not below:
            return high
        high = below[0]
        low = max((count for count, met in known.items() if not met and count < high), default=0)


def _bracket(tried: Callable[[int], bool], guess: int, most: int) -> tuple[int, int | None]:
    """A count that does not meet (or 0) and a larger one that does, in strides that double."""
    stride, at = 1, guess
    if tried(at):
        while at > 1:
            below = max(1, at - stride)
            if not tried(below):
                return below, at
            at, stride = below, 2 * stride
        return 0, at
    while at < most:
        above = min(most, at + stride)
        if tried(above):
            return at, above
        at, stride = above, 2 * stride
    return at, None
