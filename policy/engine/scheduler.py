"""Continuous batching as vLLM's scheduler does it, one deterministic step at a time.

Each step takes the running requests first, in the order in which they were admitted, then the
waiting ones, each as many tokens as it needs and the batch still holds: one for a decode, a chunk
of the prompt for a prefill. When KV cache runs out the youngest running request is preempted: it
gives back its KV, waits in front, and computes prompt and output again. Source: vLLM's
``v1/core/sched/scheduler.py``. Requests do not share KV of cached prefixes: each holds its own.

Most steps are alike: those who run decode one token each, and nobody comes or goes. :meth:`Scheduler.alike`
counts the next ones, which may be taken at once with :meth:`Scheduler.leap`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from policy.engine.model import EngineModel, Limits
from policy.engine.prefix_cache import PrefixCache


@dataclass(slots=True, eq=False)
class Request:
    """A request to run: counts in tokens.

    ``prompt_tokens`` are to be computed but for ``cached_tokens``, found in the prefix cache;
    ``output_tokens`` are produced, the first in the step that completes the prompt. ``blocks`` are those of
    the prompt in :class:`policy.engine.prefix_cache.PrefixCache`.
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
    """One step: it lasts ``duration_s`` seconds, and then has happened what the rest says.

    ``tokens`` counts new output tokens by request id, in scheduling order; ``first`` have had their first,
    ``finished`` their last; ``preempted`` lost their KV. ``scheduled`` is n, ``running`` R during the step;
    ``waiting`` requests and ``kv_used`` tokens are as after it.
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
    """What steps take that are alike: the first ``step_s`` seconds, each further one ``growth_s`` more."""

    step_s: float
    growth_s: float

    def lasts(self, steps: int) -> float:
        """Seconds of so many steps."""
        return steps * (self.step_s + self.growth_s * (steps - 1) / 2)

    def ended(self, elapsed_s: float) -> int:
        """How many steps have ended after ``elapsed_s``, to within one: a float is rounded."""
        # Solved without a difference of what may be nearly equal.
        linear = self.step_s - self.growth_s / 2
        root = math.sqrt(linear * linear + 2 * self.growth_s * elapsed_s)
        return int(2 * elapsed_s / (linear + root))


class Scheduler:
    """The requests of one engine; mutable, without a clock: a step says how long it takes.

    With a ``cache`` the cached tokens of a request are looked up when it is submitted, and again when it
    is admitted. Without one they are what the request says.
    """

    def __init__(self, model: EngineModel, limits: Limits, cache: PrefixCache | None = None) -> None:
        self._model = model
        self._limits = limits
        self._cache = cache
        self._requests: dict[str, Request] = {}
        self._running: list[Request] = []
        self._waiting: deque[Request] = deque()
        self._kv_used = 0

    @property
    def running(self) -> int:
        """Requests that hold KV."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that are queued, new or preempted."""
        return len(self._waiting)

    @property
    def kv_used(self) -> int:
        """Tokens in KV cache."""
        return self._kv_used

    @property
    def prefilling(self) -> int:
        """Tokens to compute before the requests that are here without one have their first."""
        fresh = [request for request in self._requests.values() if not request.produced]
        return sum(request.prompt_tokens - max(request.computed, request.cached_tokens) for request in fresh)

    def submit(self, request: Request) -> None:
        """Queue ``request``; raises :class:`ValueError` as :meth:`check` does."""
        self.check(request)
        request.computed = request.produced = 0
        request.restarted = False
        request.cached_tokens = self._cached(request)
        self._requests[request.id] = request
        self._waiting.append(request)

    def check(self, request: Request) -> None:
        """Raise :class:`ValueError` if ``request`` cannot be queued.

        That is for an id in use, for counts that make no request, and for one that could never hold its
        prompt and output in KV.
        """
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
            self._kv_used -= request.computed
        else:
            self._waiting.remove(request)
        return True

    def step(self) -> StepResult:
        """Run one step; with nothing to run it lasts 0 seconds and schedules nothing."""
        preempted: list[Request] = []
        budget = self._continue_running(self._limits.max_num_batched_tokens, preempted)
        self._make_room()
        if not preempted:
            budget = self._admit(budget)
        scheduled = self._limits.max_num_batched_tokens - budget
        running = len(self._running)
        duration = self._model.step_time(scheduled, self._kv_used, running) if scheduled else 0.0
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
                    self._kv_used -= request.computed
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
            kv_used=self._kv_used,
        )

    def alike(self) -> int:
        """How many of the next steps are decodes of all who run, and end with the same requests here.

        In none of them anybody has the first or the last token, starts, or is preempted. Requests that come
        in between may start at the next step, so they end it.
        """
        running, limits = len(self._running), self._limits
        if not running or running > limits.max_num_batched_tokens or self._admissible(running):
            return 0
        steps = (limits.kv_tokens - self._kv_used) // running
        for request in self._running:
            if not request.produced or request.computed + 1 != request.prompt_tokens + request.produced:
                return 0
            steps = min(steps, request.output_tokens - request.produced - 1)
        if self._waiting and self._cache is not None:
            # With less in the cache whoever is next might start.
            steps = min(steps, self._cache.spare(self._kv_used) // running)
        return steps

    def pace(self) -> StepTimes:
        """How long the steps take that :meth:`alike` counts: each has a token more of each request in KV."""
        model, running = self._model, len(self._running)
        first = model.step_time(running, self._kv_used + running, running)
        return StepTimes(first, model.g * running / model.degree)

    def leap(self, steps: int) -> None:
        """Run ``steps`` of those that :meth:`alike` counted, at once; who came since waits meanwhile."""
        for request in self._running:
            request.computed += steps
            request.produced += steps
        self._kv_used += steps * len(self._running)
        self._make_room()

    def _admissible(self, running: int) -> bool:
        """Whether a waiting request would start beside ``running`` ones that decode."""
        limits = self._limits
        room = limits.max_num_batched_tokens - running
        if not self._waiting or not room or running >= limits.max_num_seqs:
            return False
        cached, part = self._first_part(self._waiting[0], room)
        return self._kv_used + running + cached + part <= limits.kv_tokens

    def _first_part(self, request: Request, room: int) -> tuple[int, int]:
        """What a waiting request would start with: tokens that are cached, and that the step computes."""
        cached = self._cached(request)
        return cached, min(request.prompt_tokens + request.produced - cached, room)

    def _cached(self, request: Request) -> int:
        if self._cache is None:
            return request.cached_tokens
        cached = self._cache.lookup(request.blocks, request.prompt_tokens)
        # After a preemption it computes its own prompt again.
        return min(cached, request.cached_tokens) if request.restarted else cached

    def _continue_running(self, budget: int, preempted: list[Request]) -> int:
        """Schedule the running requests; what is left of ``budget``."""
        running, capacity = self._running, self._limits.kv_tokens
        index = 0
        while index < len(running) and budget:
            request = running[index]
            part = min(request.prompt_tokens + request.produced - request.computed, budget)
            while self._kv_used + part > capacity:
                victim = running.pop()
                self._release(victim)
                self._kv_used -= victim.computed
                victim.computed = 0
                self._waiting.appendleft(victim)
                preempted.append(victim)
                if victim is request:
                    return budget
            request.computed += part
            self._kv_used += part
            budget -= part
            index += 1
        return budget

    def _admit(self, budget: int) -> int:
        """Start waiting requests while batch, seats and KV last; what is left of ``budget``."""
        limits = self._limits
        while budget and self._waiting and len(self._running) < limits.max_num_seqs:
            request = self._waiting[0]
            cached, part = self._first_part(request, budget)
            if self._kv_used + cached + part > limits.kv_tokens:
                break
            self._waiting.popleft()
            self._running.append(request)
            request.cached_tokens = cached
            request.computed = cached + part
            self._kv_used += request.computed
            if self._cache is not None:
                self._cache.hold(request.blocks)
                self._cache.make_room(self._kv_used)
            budget -= part
        return budget

    def _release(self, request: Request) -> None:
        request.restarted = True
        if self._cache is not None:
            self._cache.release(request.blocks, min(request.computed, request.prompt_tokens))

    def _make_room(self) -> None:
        if self._cache is not None:
            self._cache.make_room(self._kv_used)
