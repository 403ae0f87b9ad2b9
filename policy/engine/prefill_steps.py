"""How long a prompt takes at an engine of which every step computes prompts: those that came in the last.

Vectors and answers of one token leave nothing to decode, so that an engine serves in batches, each as large
as the one before was long. That feeds on itself: how many come in a step varies by chance, and with its
length.
"""

from __future__ import annotations

import math
from collections.abc import Callable

# No variance grows by more than this as it feeds on itself, and no queue is longer than of so full an engine.
_MOST_GROWTH = 20.0
_FULLEST = 0.98
_PRECISION = 1e-5

Step = Callable[[float, float, float], float]


def prompt_steps(step: Step, prompt: float, batch: float, lam: float) -> tuple[float, float]:
    """Mean and variance, in seconds, of the time to the first token of prompts of ``prompt`` tokens, of which
    ``lam`` come per second at random, and which fit into a step of ``batch`` tokens."""
    most = max(batch / prompt, 1.0)

    def lasts(count: float) -> float:
        count = min(count, most)
        return step(count * prompt, count * prompt, count)

    alone, longest = lasts(1.0), lasts(most)
    mean = _mean_step(lasts, lam, alone, longest)
    idle = math.exp(-lam * mean)
    begun = lam * mean + idle
    grows = lasts(begun + 1.0) - lasts(begun)
    spread = grows * grows * lam * mean / max(1.0 - (lam * grows) ** 2, 1.0 / _MOST_GROWTH)
    # Who comes while a step runs finds a long one rather than a short one, and so many beside it afterwards.
    found = mean + spread / mean
    rest = found / 2.0
    own = lasts(1.0 + lam * found)
    grows = lasts(2.0 + lam * found) - own
    variance = (mean * mean + 3.0 * spread) / 3.0 - rest * rest + grows * grows * lam * (found + lam * spread)
    # A request to an idle engine does not wait.
    busy = mean / (mean + idle / lam) if lam > 0.0 else 0.0
    variance = busy * (max(variance, 0.0) + (1.0 - busy) * (rest + own - alone) ** 2)
    full = min(lam * longest / most, _FULLEST)
    waits, wait = full**most, longest / most / (2.0 * (1.0 - full))
    variance += (2.0 - waits) * waits * wait**2
    return busy * (rest + own) + (1.0 - busy) * alone + waits * wait, variance


def _mean_step(lasts: Callable[[float], float], lam: float, alone: float, longest: float) -> float:
    """How long a step is in which those are who came during one as long, or one who found none running.

    By Newton's steps from below, which do not pass the root of what is convex.
    """

    def excess(seconds: float) -> float:
        return lasts(lam * seconds + math.exp(-lam * seconds)) - seconds

    seconds = alone
    for _ in range(30):
        above = excess(seconds)
        if above <= _PRECISION * seconds:
            break
        nudge = 1e-3 * seconds
        slope = (excess(seconds + nudge) - above) / nudge
        if slope >= 0.0:
            return longest
        seconds = min(seconds - above / slope, longest)
    return seconds
