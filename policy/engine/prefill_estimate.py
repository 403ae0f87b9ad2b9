"""An engine's speed in a form that a router can afford to ask: prefill seconds in closed form."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from policy.engine.performance_model import BatchLimits, EngineModel, Timing
from policy.request import Request

SEGMENTS: Final = 32
# Tables that are kept. Most replicas of a fleet share one; to make it takes as long as a choice among eight.
MOST_TABLES: Final = 256
# What is assumed of a server of which nothing is known: an 8B model on a large card, with vLLM's batch.
GENERIC = Timing(
    limits=BatchLimits(max_num_batched_tokens=8192, max_num_seqs=256, kv_tokens=0),
    model=EngineModel(o=2e-3, w=6e-3, c=3e-5, g=5e-8, r=1e-5),
)


class StepTable:
    """The step time of one engine, tabulated once: a step costs a router 0.3 us instead of 2 us.

    ``batch`` and ``seats`` are max_num_batched_tokens and max_num_seqs, ``kv_tokens`` the KV capacity
    (0: not known). ``capacity`` are the tokens per second of a full batch, to weigh replicas by.
    ``copy_s`` are the seconds to copy one token's KV from host memory.
    ``height`` and ``slope`` are the table, of segments ``width`` tokens wide; ``a_token`` and ``a_request``
    are the seconds of each token in KV and of each request in a step.
    """

    def __init__(self, timing: Timing) -> None:
        model, limits = timing.model, timing.limits
        assert model is not None
        self.batch = limits.max_num_batched_tokens
        self.seats = limits.max_num_seqs
        self.kv_tokens = limits.kv_tokens
        self.width = width = self.batch / SEGMENTS
        self.per_width = 1.0 / width
        empty = [model.step_time(i * width, 0.0, 0.0) for i in range(SEGMENTS + 2)]
        self.height = empty[:-1]
        self.slope = [(empty[i + 1] - empty[i]) / width for i in range(SEGMENTS + 1)]
        self._full = empty[SEGMENTS]
        self.a_token = model.g / model.degree
        self.a_request = model.r
        self.copy_s = model.copy_s(1)
        self.capacity = self.batch / (self._full + self.seats / 2 * self.a_request)

    def step_s(self, tokens: float, kv_tokens: float, running: float) -> float:
        """Seconds of a step with ``tokens`` scheduled: the engine model's, up to a full batch."""
        i = min(int(tokens / self.width), SEGMENTS)
        linear = self.height[i] + self.slope[i] * (tokens - i * self.width)
        return linear + self.a_token * kv_tokens + self.a_request * running

    def prefill_s(self, tokens: float, kv_tokens: float, running: float) -> float:
        """Seconds until ``tokens`` prompt tokens ran in chunks beside ``running`` decodes.

        Closed form of :meth:`policy.engine.performance_model.EngineModel.prefill_s` with the context at
        ``kv_tokens``: full steps, and one for the rest.
        """
        room = max(self.batch - running, self.batch * 0.1)
        if 0 < tokens < room:  # as nearly all are; step_s, written out
            scheduled = running + tokens
            i = min(int(scheduled * self.per_width), SEGMENTS)  # more may run than a batch has tokens
            return (
                self.height[i]
                + self.slope[i] * (scheduled - i * self.width)
                + self.a_token * kv_tokens
                + self.a_request * (running + 1)
            )
        full = tokens // room
        rest = tokens - full * room
        seconds = self.step_s(running + rest, kv_tokens, running + 1) if rest > 0 else 0.0
        if full:
            seconds += full * (self._full + self.a_token * kv_tokens + self.a_request * (running + 1))
        return seconds

    def stays_s(self, request: Request, in_flight: int, output_tokens: int, gap_factor: float = 1.0) -> float:
        """Seconds for which ``request`` runs beside a number of others, at most the batch size.

        Its answer has ``output_tokens``; ``gap_factor`` is measured inter-token gaps over predicted ones.
        """
        running = max(1, min(in_flight, self.seats))
        kv = min(running * request.tokens, self.kv_tokens) if self.kv_tokens else 0
        step = self.step_s(running, kv, running)
        return self.prefill_s(request.prompt_tokens, kv, running) + output_tokens * step * gap_factor


@lru_cache(MOST_TABLES)
def step_table_of(timing: Timing | None, assumed: Timing) -> StepTable:
    """The pace of a replica that reported ``timing``; ``assumed`` fills what it left out."""
    reported = timing or assumed
    if reported.model is None:
        reported = Timing(limits=reported.limits, model=assumed.model or GENERIC.model)
    return StepTable(reported)
