"""Continuous batching as vLLM's scheduler does it, one deterministic step at a time.

A step schedules running requests in the order of admission, then waiting ones: one token for a decode, a
chunk of the prompt for a prefill, as far as the batch has room. When KV cache runs out, the youngest running
request is preempted: it frees its KV, waits in front, and computes prompt and output again. Source: vLLM's
``v1/core/sched/scheduler.py``. Requests do not share the KV of cached prefixes.

In most steps every running request decodes one token and none starts or ends. :meth:`BatchScheduler.alike`
counts the next such steps; :meth:`BatchScheduler.leap` runs them at once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from policy.engine.performance_model import BatchLimits, EngineModel
from policy.engine.prefix_cache import PrefixCache


@dataclass(slots=True, eq=False)
class EngineRequest:
    """A request; counts in tokens.

    All of ``prompt_tokens`` but ``cached_tokens`` (found in the prefix cache) are computed. The first of
    ``output_tokens`` is produced in the step that completes the prompt. ``blocks`` are the prompt's in
    :class:`policy.engine.prefix_cache.PrefixCache`.
    """

    id: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    blocks: Sequence[Hashable] = ()
    # What the scheduler keeps: tokens in KV, tokens produced, and whether it has held KV before.
    computed: int = 0
    produced: int = 0
    restarted: bool = False


@dataclass(slots=True, frozen=True)
class StepResult:
    """The result of a step of ``duration_s`` seconds.

    ``tokens`` counts new output tokens by request id, in scheduling order; ``first`` had their first token,
    ``finished`` their last; ``preempted`` lost their KV. ``scheduled`` tokens (n), ``running`` requests (R)
    are during the step, ``waiting`` requests and ``kv_used`` tokens after it.
    """

    duration_s: float
    tokens: dict[str, int]
    first: tuple[str, ...]
    finished: tuple[str, ...]
    preempted: tuple[str, ...]
    scheduled: int
    running: int
    waiting: int
    kv_used: int


class StepTimes(NamedTuple):
    """Durations of consecutive decode steps: ``step_s`` for the first, each later one ``growth_s`` longer."""

    step_s: float
    growth_s: float

    def lasts(self, steps: int) -> float:
        """Seconds that ``steps`` steps take."""
        return steps * (self.step_s + self.growth_s * (steps - 1) / 2)

    def ended(self, elapsed_s: float) -> int:
        """Steps that ended after ``elapsed_s``, to within one (rounding)."""
        # Solved without a difference of nearly equal values.
        linear = self.step_s - self.growth_s / 2
        root = math.sqrt(linear * linear + 2 * self.growth_s * elapsed_s)
        return int(2 * elapsed_s / (linear + root))


class BatchScheduler:
    """The requests of one engine; mutable, without a clock: each step returns its duration.

    With a ``cache`` the cached tokens of a request are looked up when it is submitted and when it is
    admitted; the step in which it is admitted takes longer by the copy of those in host memory. Without one
    the request's own number is used. ``kv_used`` are the tokens in KV cache.
    """

    def __init__(self, model: EngineModel, limits: BatchLimits, cache: PrefixCache | None = None) -> None:
        self._model = model
        self._limits = limits
        self._cache = cache
        self._requests: dict[str, EngineRequest] = {}
        self._running: list[EngineRequest] = []
        self._waiting: deque[EngineRequest] = deque()
        self.kv_used = 0
        # Tokens that the requests admitted in this step found in host memory.
        self._copied = 0

    @property
    def running(self) -> int:
        """Requests that hold KV."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def prefilling(self) -> int:
        """Tokens to compute until all requests without an output token have their first one."""
        fresh = [request for request in self._requests.values() if not request.produced]
        return sum(request.prompt_tokens - max(request.computed, request.cached_tokens) for request in fresh)

    def submit(self, request: EngineRequest) -> None:
        """Queue ``request``; raises :class:`ValueError` as :meth:`check` does."""
        self.check(request)
        request.computed = request.produced = 0
        request.restarted = False
        request.cached_tokens = self._cached(request)
        self._requests[request.id] = request
        self._waiting.append(request)

    def check(self, request: EngineRequest) -> None:
        """Raise :class:`ValueError` for an id in use, invalid counts, or more tokens than KV can hold."""
        if request.id in self._requests:
            raise ValueError(f"request {request.id!r} is already here")
        if request.output_tokens < 1 or not 0 <= request.cached_tokens < request.prompt_tokens:
            raise ValueError(f"request {request.id!r} asks for nothing, or has nothing left to compute")
        # The last token produced is never computed.
        needed = request.prompt_tokens + request.output_tokens - 1
        if needed > self._limits.kv_tokens:
            raise ValueError(f"request {request.id!r} needs {needed} of {self._limits.kv_tokens} KV tokens")

    def abort(self, request_id: str) -> bool:
        """Drop a request and free its KV; whether it was here."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        # In KV at all means running: a preempted request has given its tokens back.
        if request.computed:
            self._running.remove(request)
            self._release(request)
        else:
            self._waiting.remove(request)
        return True

    def step(self) -> StepResult:
        """Run one step; with nothing to run it lasts 0 seconds and schedules nothing."""
        preempted: list[EngineRequest] = []
        self._copied = 0
        budget = self._continue_running(self._limits.max_num_batched_tokens, preempted)
        self._make_room()
        if not preempted:
            budget = self._admit(budget)
        scheduled = self._limits.max_num_batched_tokens - budget
        running = len(self._running)
        duration = self._model.step_time(scheduled, self.kv_used, running) if scheduled else 0.0
        duration += self._model.copy_s(self._copied)
        tokens: dict[str, int] = {}
        first: list[str] = []
        finished: list[str] = []
        for request in self._running:
            if request.computed == request.prompt_tokens + request.produced:
                request.produced += 1
                tokens[request.id] = 1
                if request.produced == 1:
                    first.append(request.id)
                if request.produced == request.output_tokens:
                    finished.append(request.id)
                    self._release(request)
                    del self._requests[request.id]
        if finished:
            self._running = [r for r in self._running if r.produced < r.output_tokens]
        return StepResult(
            duration_s=duration,
            tokens=tokens,
            first=tuple(first),
            finished=tuple(finished),
            preempted=tuple(request.id for request in preempted),
            scheduled=scheduled,
            running=running,
            waiting=len(self._waiting),
            kv_used=self.kv_used,
        )

    def alike(self) -> int:
        """How many next steps only decode: no request starts, ends, is preempted or has its first token.

        A request that is submitted meanwhile may start at the next step and ends the sequence.
        """
        running, limits = len(self._running), self._limits
        if not running or running > limits.max_num_batched_tokens or self._admissible(running):
            return 0
        steps = (limits.kv_tokens - self.kv_used) // running
        for request in self._running:
            if not request.produced or request.computed + 1 != request.prompt_tokens + request.produced:
                return 0
            steps = min(steps, request.output_tokens - request.produced - 1)
        if self._waiting and self._cache is not None:
            # After an eviction the next waiting request might start.
            steps = min(steps, self._cache.spare(self.kv_used) // running)
        return steps

    def pace(self) -> StepTimes:
        """Durations of the steps that :meth:`alike` counts: KV grows by one token per request and step."""
        model, running = self._model, len(self._running)
        first = model.step_time(running, self.kv_used + running, running)
        return StepTimes(first, model.g * running / model.degree)

    def leap(self, steps: int) -> None:
        """Run ``steps`` of those that :meth:`alike` counted at once; requests submitted since then wait."""
        for request in self._running:
            request.computed += steps
            request.produced += steps
        self.kv_used += steps * len(self._running)
        self._make_room()

    def _admissible(self, running: int) -> bool:
        """Whether a waiting request would start beside ``running`` ones that decode."""
        limits = self._limits
        room = limits.max_num_batched_tokens - running
        if not self._waiting or not room or running >= limits.max_num_seqs:
            return False
        cached, part = self._first_part(self._waiting[0], room)
        return self.kv_used + running + cached + part <= limits.kv_tokens

    def _first_part(self, request: EngineRequest, room: int) -> tuple[int, int]:
        """The cached tokens of a waiting request, and those that its first step would compute."""
        cached = self._cached(request)
        return cached, min(request.prompt_tokens + request.produced - cached, room)

    def _cached(self, request: EngineRequest) -> int:
        if self._cache is None:
            return request.cached_tokens
        cached = self._cache.lookup(request.blocks, request.prompt_tokens)
        # After a preemption it computes its own prompt again.
        return min(cached, request.cached_tokens) if request.restarted else cached

    def _continue_running(self, budget: int, preempted: list[EngineRequest]) -> int:
        """Schedule the running requests; what is left of ``budget``."""
        running, capacity = self._running, self._limits.kv_tokens
        index = 0
        while index < len(running) and budget:
            request = running[index]
            part = min(request.prompt_tokens + request.produced - request.computed, budget)
            while self.kv_used + part > capacity:
                victim = running.pop()
                self._release(victim)
                victim.computed = 0
                self._waiting.appendleft(victim)
                preempted.append(victim)
                if victim is request:
                    return budget
            request.computed += part
            self.kv_used += part
            budget -= part
            index += 1
        return budget

    def _admit(self, budget: int) -> int:
        """Start waiting requests while batch, seats and KV last; what is left of ``budget``."""
        limits = self._limits
        while budget and self._waiting and len(self._running) < limits.max_num_seqs:
            request = self._waiting[0]
            cached, part = self._first_part(request, budget)
            if self.kv_used + cached + part > limits.kv_tokens:
                break
            self._waiting.popleft()
            self._running.append(request)
            request.cached_tokens = cached
            request.computed = cached + part
            self.kv_used += request.computed
            if self._cache is not None:
                self._copied += self._cache.in_host(request.blocks, cached)
                self._cache.hold(request.blocks)
                self._cache.make_room(self.kv_used)
            budget -= part
        return budget

    def _release(self, request: EngineRequest) -> None:
        self.kv_used -= request.computed
        request.restarted = True
        if self._cache is not None:
            self._cache.release(request.blocks, min(request.computed, request.prompt_tokens))

    def _make_room(self) -> None:
        if self._cache is not None:
            self._cache.make_room(self.kv_used)
