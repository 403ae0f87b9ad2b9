"""The engine of one simulated replica in virtual time: the production scheduler, stepped.

Like an engine's step loop it does one thing at a time: one step, a run of equal steps (a leap), or the load
of an adapter, during which nothing is computed. A request that arrives meanwhile joins the next step. Results
do not depend on how often the engine is queried.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from policy.adapter_placement.slots import PREFETCH_PAUSE
from policy.engine.batch_scheduler import BatchScheduler, EngineRequest, StepTimes
from policy.engine.performance_model import Timing
from policy.engine.prefix_cache import PrefixCache
from policy.wire.capture import BLOCK_TOKENS
from sim.simulator.adapters import Entry, SimulatedSlots

Load = tuple[Entry, Entry | None]


class EngineJob(NamedTuple):
    """A request: ``number`` names it in events, ``adapter`` may be empty, ``blocks`` are those of
    :class:`sim.arrivals.Arrival`."""

    number: int
    input_tokens: int
    output_tokens: int
    adapter: str = ""
    blocks: tuple[int, ...] = ()


def blocks_of(job: EngineJob) -> tuple[Hashable, ...]:
    """The blocks of a request in the prefix cache; adapters share none."""
    return tuple((job.adapter, block) for block in job.blocks) if job.adapter else job.blocks


class TokenEventKind(IntEnum):
    """What happened to a request."""

    FIRST = 0
    DONE = 1


class TokenEvent(NamedTuple):
    """The first or last token of a request; ``cached_tokens`` of its prompt were in the prefix cache."""

    at: float
    number: int
    kind: TokenEventKind
    first_at: float
    cached_tokens: int


@dataclass(slots=True, eq=False)
class _Live:
    """A request in the engine; while ``deferred`` it waits for an adapter slot."""

    number: int
    adapter: str
    request: EngineRequest
    deferred: bool = False
    first_at: float = math.nan


class VirtualTimeEngine:
    """The engine of one replica. Instants are seconds of the run and never decrease.

    It holds up to ``slots`` adapters by ``slot_rules``; each takes ``adapter_load_s`` seconds to load.
    ``prefix_tokens`` is the size of the prefix cache, ``None`` for none, ``host_tokens`` of its host memory.
    Properties are as of the last instant that a call was given.
    """

    def __init__(
        self,
        timing: Timing,
        *,
        slots: int = 0,
        adapter_load_s: float = 0.0,
        prefix_tokens: int | None = None,
        host_tokens: int = 0,
        slot_rules: type[SimulatedSlots] = SimulatedSlots,
    ) -> None:
        if timing.model is None:
            raise ValueError("an engine without coefficients takes no time that could be simulated")
        self._model = timing.model
        self._limits = timing.limits
        self._slot_count = slots
        self._load_s = adapter_load_s
        self._slot_rules = slot_rules
        self._prefix_tokens, self._host_tokens = prefix_tokens, host_tokens
        self.preempted = 0
        self._factor = 1.0
        self._now = self._since = 0.0
        self._tokens = self._loads = self._changes = self._serial = 0
        self._busy_s = 0.0
        self._events: list[TokenEvent] = []
        self._empty()

    def _empty(self) -> None:
        self._live: dict[str, _Live] = {}
        self._ids: dict[int, str] = {}
        self._fresh: dict[str, _Live] = {}
        tokens = self._prefix_tokens
        self.cache: PrefixCache | None = None
        if tokens is not None:
            self.cache = PrefixCache(tokens, BLOCK_TOKENS, host_tokens=self._host_tokens, reports=True)
        self._scheduler = BatchScheduler(self._model, self._limits, self.cache)
        self.slots = self._slot_rules(self._slot_count)
        self._loaded_at = -math.inf
        self._idle()

    def _idle(self) -> None:
        self._end = math.inf
        # The current leap (its steps and their pace), and the results due when the current work ends.
        self._leap = 0
        self._pace = StepTimes(0.0, 0.0)
        self._due_tokens = self._due_preempted = 0
        self._due_first: tuple[str, ...] = ()
        self._due_done: tuple[str, ...] = ()

    @property
    def running(self) -> int:
        """Requests in the batch, those with their last token in the current step included."""
        return len(self._live) - self._scheduler.waiting - self.slots.deferred

    @property
    def streams(self) -> tuple[int, int]:
        """The requests that have produced tokens, and how many in all, to the last step that has ended."""
        produced = [live.request.produced for live in self._live.values() if live.request.produced]
        leapt = self._ended(self._now) * len(produced) if self._leap else 0
        return len(produced), sum(produced) + leapt

    @property
    def waiting(self) -> int:
        """Requests in the engine's own queue."""
        return self._scheduler.waiting

    @property
    def in_flight(self) -> int:
        return len(self._live)

    @property
    def kv_used(self) -> float:
        """The fraction of the KV cache in use, the current step included."""
        leapt = self._begun(self._now) * self._scheduler.running if self._leap else 0
        return (self._scheduler.kv_used + leapt) / self._limits.kv_tokens

    @property
    def tokens(self) -> int:
        """Tokens of all steps that have ended."""
        return self._tokens + (self._ended(self._now) * self._scheduler.running if self._leap else 0)

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens to compute before all requests have their first token."""
        return sum(
            live.request.prompt_tokens - max(live.request.computed, live.request.cached_tokens)
            for live in self._fresh.values()
            if not live.request.produced
        )

    @property
    def busy_s(self) -> float:
        """Seconds for which it had work."""
        return self._busy_s + (0.0 if self._end == math.inf else self._now - self._since)

    @property
    def adapter_loads(self) -> int:
        return self._loads + self.slots.loads

    @property
    def adapter_changes(self) -> int:
        return self._changes + self.slots.changes

    def submit(self, job: EngineJob, at: float) -> None:
        """Add a request.

        Raises :class:`ValueError` for a number in use, for invalid token counts, for a request that could
        never fit in KV, and for an adapter where there are no slots.
        """
        self.catch_up(at)
        if job.number in self._ids:
            raise ValueError(f"request {job.number} is already here")
        if job.adapter and not self._slot_count:
            raise ValueError(f"request {job.number} needs adapter {job.adapter!r}, and there are no slots")
        self._serial += 1
        name = str(self._serial)
        blocks = blocks_of(job)
        request = EngineRequest(name, job.input_tokens, job.output_tokens, blocks=blocks)
        self._scheduler.check(request)
        live = _Live(job.number, job.adapter, request)
        self._live[name] = self._fresh[name] = live
        self._ids[job.number] = name
        self._cut(at)
        if job.adapter and not self.slots.submit(name, job.adapter, at):
            live.deferred = True
            if self.cache is not None:
                request.cached_tokens = self.cache.lookup(blocks, job.input_tokens)
        else:
            self._scheduler.submit(request)

    def catch_up(self, at: float) -> None:
        """Run up to ``at``; raises :class:`ValueError` if time goes back."""
        if at < self._now:
            raise ValueError(f"time goes back: {at} s after {self._now} s")
        while True:
            if self._end == math.inf:
                if not self._live:
                    self._since = at
                if self._since >= at:
                    break
                self._begin(self._since)
            if self._end > at:
                break
            self._finish()
        self._now = at

    def advance(self, to: float) -> list[TokenEvent]:
        """Run up to ``to``; returns the events since the last call in order."""
        self.catch_up(to)
        events, self._events = self._events, []
        return events

    def next_at(self) -> float:
        """The instant to advance to next: now if events are pending; ``inf`` without work."""
        if self._events:
            return self._now
        if self._end < math.inf or not self._live:
            return self._end
        # More requests may arrive at this instant, so the next step starts after it.
        return math.nextafter(self._since, math.inf)

    def abort(self, number: int) -> bool:
        """Drop a request at the last instant; returns whether it was in the engine."""
        name = self._ids.pop(number, None)
        if name is None:
            return False
        live = self._live[name]
        self._fresh.pop(name, None)
        if live.deferred:
            del self._live[name]
            self.slots.abort(name, live.adapter)
            return True
        self._cut(self._now)
        if self._leap:
            # The current step includes it and keeps its duration.
            self._tokens, ended = self.tokens, self._ended(self._now)
            self._due_tokens -= ended * self._scheduler.running
            self._scheduler.leap(self._leap)
            self._leap = 0
        self._scheduler.abort(name)
        del self._live[name]
        if live.adapter:
            self.slots.finish(live.adapter)
        return True

    def look_ahead(self, at: float) -> None:
        """Check again which adapter to prefetch."""
        self.catch_up(at)
        self._look_ahead(at)

    def slow(self, factor: float, at: float) -> None:
        """Steps that begin from now on take ``factor`` times as long as the model says."""
        self.catch_up(at)
        self._cut(at)
        self._factor = factor

    def crash(self) -> list[int]:
        """Lose everything at the last instant; returns the numbers of the requests in order of arrival."""
        lost = list(self._ids)
        self._busy_s = self.busy_s
        self._tokens = self.tokens
        self._loads += self.slots.loads
        self._changes += self.slots.changes + 1
        self._since = self._now
        self._empty()
        return lost

    def _begin(self, at: float) -> None:
        """Begin a load, a leap, or one step."""
        hurried = False
        if self._slot_count:
            load, hurried = self._next_load(at)
            if load is not None and not hurried:
                self._load(load, at)
                return
        scheduler = self._scheduler
        steps = 0 if hurried else scheduler.alike()
        if steps > 1:
            self._leap = steps
            pace = scheduler.pace()
            self._pace = StepTimes(self._factor * pace.step_s, self._factor * pace.growth_s)
            self._due_tokens = steps * scheduler.running
            self._end = self._end_of(steps)
            return
        result = scheduler.step()
        self._due_tokens = result.scheduled
        self._due_preempted = len(result.preempted)
        self._due_first, self._due_done = result.first, result.finished
        self._end = at + self._factor * result.duration_s

    def _finish(self) -> None:
        at = self._end
        self._busy_s += at - self._since
        self._tokens += self._due_tokens
        self.preempted += self._due_preempted
        if self._leap:
            self._scheduler.leap(self._leap)
        if self.slots.loading is not None:
            self._loaded_at = at
            self._admit_waiting(at)
        for name in self._due_first:
            live = self._fresh.pop(name, None)
            if live is not None:
                live.first_at = at
                self._events.append(
                    TokenEvent(at, live.number, TokenEventKind.FIRST, at, live.request.cached_tokens)
                )
        for name in self._due_done:
            live = self._live.pop(name, None)
            if live is not None:
                self._leave(live, at)
        self._since = at
        self._idle()
        if self._slot_count and not self._live:
            self._look_ahead(at)

    def _next_load(self, at: float) -> tuple[Load | None, bool]:
        """The next load, and whether running requests get time before it."""
        scheduler, slots = self._scheduler, self.slots
        if slots.deferred:
            self._admit_waiting(at)
        load = slots.next(at)
        if load is None:
            return None, False
        pause_s = self._load_s * (1.0 if load[0].waiting else PREFETCH_PAUSE)
        busy = scheduler.running + scheduler.waiting > 0
        return load, busy and at < self._loaded_at + pause_s

    def _load(self, load: Load, at: float) -> None:
        self.slots.begin_load(*load)
        self._end = at + self._load_s

    def _look_ahead(self, at: float) -> None:
        """Prefetch an adapter: at once in an idle engine, else after the current step."""
        load = self.slots.next(at)
        if load is None or load[0].waiting:
            return
        if self._live:
            self._cut(at)
        elif self._end == math.inf:
            self._load(load, at)

    def _admit_waiting(self, at: float) -> None:
        """Queue the requests whose adapter is now loaded."""
        for name in self.slots.admit_waiting(at):
            live = self._live[name]
            live.deferred = False
            self._scheduler.submit(live.request)

    def _leave(self, live: _Live, at: float) -> None:
        del self._ids[live.number]
        if live.adapter:
            self.slots.finish(live.adapter)
        self._events.append(
            TokenEvent(at, live.number, TokenEventKind.DONE, live.first_at, live.request.cached_tokens)
        )

    def _cut(self, at: float) -> None:
        """End the current leap after its current step."""
        if self._leap:
            steps = self._begun(at)
            if steps < self._leap:
                self._leap = steps
                self._due_tokens = steps * self._scheduler.running
                self._end = self._end_of(steps)
                if self._end <= at:
                    self._finish()

    def _end_of(self, steps: int) -> float:
        return self._since + self._pace.lasts(steps)

    def _ended(self, at: float) -> int:
        steps = min(self._leap, self._pace.ended(at - self._since))
        while self._end_of(steps) > at:
            steps -= 1
        while steps < self._leap and self._end_of(steps + 1) <= at:
            steps += 1
        return steps

    def _begun(self, at: float) -> int:
        steps = self._ended(at)
        return steps + (steps < self._leap and self._end_of(steps) < at)
