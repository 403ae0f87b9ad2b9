"""Step times of an engine, collected until they are reported."""

from __future__ import annotations

import msgspec

from policy.engine.step_samples import StepSample, pool_steps
from policy.wire.controller_reports import EngineReport

# Maximum samples of a report: keeps a heartbeat below 2 KB.
MOST = 16
# Steps are pooled after this many, in case nothing takes the reports.
_POOL_AT = 512


class StepStats:
    """Measured steps, without the gaps in which the engine was idle.

    A step is timed from the end of the one before.
    """

    def __init__(self) -> None:
        self._taken: list[StepSample] = []
        self._ended: float | None = None

    def ended(self, at: float, tokens: int, kv_tokens: float, running: int, *, goes_on: bool) -> None:
        """A step ended at the instant ``at``, with ``tokens`` scheduled of ``running`` requests.

        ``kv_tokens`` of context were in KV. Unless it ``goes_on``, nothing is left to do.
        """
        if self._ended is not None and tokens and at > self._ended:
            self._taken.append(StepSample(1, tokens, kv_tokens, running, at - self._ended))
            if len(self._taken) >= _POOL_AT:
                self._taken = list(pool_steps(self._taken, MOST))
        self._ended = at if goes_on else None

    def broken(self) -> None:
        """The engine does something other than a step: discard the time of the step that ends next."""
        self._ended = None

    def take(self) -> tuple[StepSample, ...]:
        """The steps since the last call, similar ones pooled."""
        taken, self._taken = self._taken, []
        return tuple(_short(sample) for sample in pool_steps(taken, MOST))


def merge(one: EngineReport | None, other: EngineReport | None) -> EngineReport | None:
    """The sum of two reports of one engine, of which ``other`` is the newer."""
    if one is None or other is None:
        return one or other
    steps = tuple(_short(sample) for sample in pool_steps((*one.steps, *other.steps), MOST))
    return msgspec.structs.replace(other, steps=steps)


def _short(sample: StepSample) -> StepSample:
    """Rounded to the significant digits."""
    return StepSample(
        sample.count,
        round(sample.tokens, 1),
        round(sample.kv_tokens),
        round(sample.running, 1),
        float(f"{sample.seconds:.4g}"),
    )
