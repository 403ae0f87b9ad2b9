"""One replica's engine in virtual time: the scheduler, stepped one by one or over many steps that are alike.

One thing at a time, as in an engine's step loop: a step, many that are alike, or the load of an adapter,
during which nothing is computed. Whoever comes while it is under way joins at the next step's start; all that
come at the instant of that start join the same step. Whatever it does ends at the same instants, whether the
engine is asked often or rarely.

This module is over 400 lines: running steps, admitted requests and reports share one state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from policy.engine.model import Timing
from policy.engine.prefix_cache import PrefixCache
from policy.engine.scheduler import Request, Scheduler, StepTimes
from policy.placement.slots import PREFETCH_PAUSE
from policy.wire.capture import BLOCK_TOKENS
from sim.twin.adapter_slots import Entry, TwinSlots

Load = tuple[Entry, Entry | None]


class Job(NamedTuple):
    """A request: ``number`` names it in events; ``adapter`` is empty for none.

    ``blocks`` of its prompt are as in :attr:`sim.arrival.Arrival.blocks`.
    """

    number: int
    input_tokens: int
    output_tokens: int
    adapter: str = ""
    blocks: tuple[int, ...] = ()


class Kind(IntEnum):
    """What happened to a request."""

    FIRST = 0
    DONE = 1


class Event(NamedTuple):
    """A request had its ``kind`` of token ``at`` that instant, and its first at ``first_at``.

    ``cached_tokens`` of its prompt were found in the prefix cache.
    """

    at: float
    number: int
    kind: Kind
    first_at: float
    cached_tokens: int


@dataclass(slots=True, eq=False)
class _Live:
    """A request that is here; it holds a slot, or waits for one while ``deferred``."""

    number: int
    adapter: str
    request: Request
    deferred: bool = False
    first_at: float = math.nan


class Engine:
    """The engine of one replica. Instants are seconds of the run, and never go back.

    It holds up to ``slots`` adapters by the rules of ``slot_rules``; each takes ``adapter_load_s`` to load.
    ``prefix_tokens`` is how many tokens its prefix cache holds; ``None`` shares nothing. What it reports is
    as of its last instant: that of :meth:`catch_up`, or of any call that is given one.
    """

    def __init__(
        self,
        timing: Timing,
        *,
        slots: int = 0,
        adapter_load_s: float = 0.0,
        prefix_tokens: int | None = None,
        slot_rules: type[TwinSlots] = TwinSlots,
    ) -> None:
        if timing.model is None:
            raise ValueError("an engine without coefficients takes no time that could be simulated")
        self._model = timing.model
        self._limits = timing.limits
        self._slot_count = slots
        self._load_s = adapter_load_s
        self._slot_rules = slot_rules
        self._prefix_tokens = prefix_tokens
        self.preempted = 0
        self._factor = 1.0
        self._now = self._since = 0.0
        self._tokens = self._loads = self._changes = self._serial = 0
        self._busy_s = 0.0
        self._events: list[Event] = []
        self._empty()

    def _empty(self) -> None:
        """Nobody is here, nothing is under way or loaded."""
        self._live: dict[str, _Live] = {}
        self._ids: dict[int, str] = {}
        self._fresh: dict[str, _Live] = {}
        tokens = self._prefix_tokens
        self._cache = None if tokens is None else PrefixCache(tokens, BLOCK_TOKENS)
        self._scheduler = Scheduler(self._model, self._limits, self._cache)
        self.slots = self._slot_rules(self._slot_count)
        self._loaded_at = -math.inf
        self._still()

    def _still(self) -> None:
        """Nothing is under way."""
        self._end = math.inf
        # Of what is under way: the steps of a leap and their pace; what the scheduler says has then happened.
        self._leap = 0
        self._pace = StepTimes(0.0, 0.0)
        self._due_tokens = self._due_preempted = 0
        self._due_first: tuple[str, ...] = ()
        self._due_done: tuple[str, ...] = ()

    @property
    def running(self) -> int:
        """Requests in the batch; one whose last token is in the step under way still runs."""
        return len(self._live) - self._scheduler.waiting - self.slots.deferred

    @property
    def waiting(self) -> int:
        """Requests in the engine's own queue."""
        return self._scheduler.waiting

    @property
    def deferred(self) -> int:
        """Requests that wait for their adapter."""
        return self.slots.deferred

    @property
    def in_flight(self) -> int:
        """All requests that are here."""
        return len(self._live)

    @property
    def kv_used(self) -> float:
        """The fraction of the KV cache in use, with what the step under way computes."""
        leapt = self._begun(self._now) * self._scheduler.running if self._leap else 0
        return (self._scheduler.kv_used + leapt) / self._limits.kv_tokens

    @property
    def tokens(self) -> int:
        """Tokens of all steps that have ended."""
        return self._tokens + (self._ended(self._now) * self._scheduler.running if self._leap else 0)

    @property
    def pending_tokens(self) -> int:
        """Tokens of prompts to compute before the requests that are here without one have their first."""
        return sum(
            live.request.prompt_tokens - max(live.request.computed, live.request.cached_tokens)
            for live in self._fresh.values()
            if not live.request.produced
        )

    @property
    def busy_s(self) -> float:
        """For how long it has had something to do."""
        return self._busy_s + (0.0 if self._end == math.inf else self._now - self._since)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Those that are loaded, the least recently used first."""
        return self.slots.loaded

    @property
    def loading(self) -> str | None:
        """The adapter that is being loaded."""
        return self.slots.loading

    @property
    def awaited(self) -> tuple[str, ...]:
        """The adapters that requests wait for."""
        return self.slots.awaited

    @property
    def adapter_loads(self) -> int:
        """Loads since the start."""
        return self._loads + self.slots.loads

    @property
    def adapter_changes(self) -> int:
        """How often what is loaded has changed since the start."""
        return self._changes + self.slots.changes

    def submit(self, job: Job, at: float) -> None:
        """A request comes.

        Raises :class:`ValueError` for a number that is here, for counts that make no request, for one that
        could never fit in KV, and for an adapter where there are no slots.
        """
        self.catch_up(at)
        if job.number in self._ids:
            raise ValueError(f"request {job.number} is already here")
        if job.adapter and not self._slot_count:
            raise ValueError(f"request {job.number} needs adapter {job.adapter!r}, and there are no slots")
        self._serial += 1
        name = str(self._serial)
        # Adapters share no KV.
        blocks = tuple((job.adapter, block) for block in job.blocks) if job.adapter else job.blocks
        request = Request(name, job.input_tokens, job.output_tokens, blocks=blocks)
        self._scheduler.check(request)
        live = _Live(job.number, job.adapter, request)
        self._live[name] = self._fresh[name] = live
        self._ids[job.number] = name
        self._cut(at)
        if job.adapter and not self.slots.submit(name, job.adapter, at):
            live.deferred = True
            if self._cache is not None:
                request.cached_tokens = self._cache.lookup(blocks, job.input_tokens)
        else:
            self._scheduler.submit(request)

    def catch_up(self, at: float) -> None:
        """Run the engine up to ``at``, as of which it reports; :meth:`advance` returns what happened.

        Raises :class:`ValueError` where time goes back.
        """
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

    def advance(self, to: float) -> list[Event]:
        """Run all that ends at or before ``to``; what happened since the last call, in the order of time."""
        self.catch_up(to)
        events, self._events = self._events, []
        return events

    def next_at(self) -> float:
        """The instant to advance to next; ``inf`` when there is nothing to do.

        It is now if something has happened that nobody took yet. Else nothing happens before it; what happens
        then is a first or last token, or only the engine's own.
        """
        if self._events:
            return self._now
        if self._end < math.inf or not self._live:
            return self._end
        # What comes next begins after this instant, at which more may come.
        return math.nextafter(self._since, math.inf)

    def abort(self, number: int) -> bool:
        """Drop a request and free what it holds, at its last instant; whether it was here."""
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
            # The step under way has begun with it, and lasts as long as it would have.
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
        """What its rule would load ahead of requests may be another by now."""
        self.catch_up(at)
        self._look_ahead(at)

    def slow(self, factor: float, at: float) -> None:
        """Steps that begin from now on take ``factor`` times as long as the model says."""
        self.catch_up(at)
        self._cut(at)
        self._factor = factor

    def crash(self) -> list[int]:
        """Lose everything, at its last instant: the numbers of those who were here, as they came."""
        lost = list(self._ids)
        self._busy_s = self.busy_s
        self._tokens = self.tokens
        self._loads += self.slots.loads
        self._changes += self.slots.changes + 1
        self._since = self._now
        self._empty()
        return lost

    def _begin(self, at: float) -> None:
        """Begin what is next: a load, steps that are alike, or one step."""
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
        """What is under way ends."""
        at = self._end
        self._busy_s += at - self._since
        self._tokens += self._due_tokens
        self.preempted += self._due_preempted
        if self._leap:
            self._scheduler.leap(self._leap)
        if self.slots.loading is not None:
            self._loaded_at = at
            self._let_in(at)
        for name in self._due_first:
            live = self._fresh.pop(name, None)
            if live is not None:
                live.first_at = at
                self._events.append(Event(at, live.number, Kind.FIRST, at, live.request.cached_tokens))
        for name in self._due_done:
            live = self._live.pop(name, None)
            if live is not None:
                self._leave(live, at)
        self._since = at
        self._still()
        if self._slot_count and not self._live:
            self._look_ahead(at)

    def _next_load(self, at: float) -> tuple[Load | None, bool]:
        """What to load next, and whether requests that run have to get some time before."""
        scheduler, slots = self._scheduler, self.slots
        if slots.deferred:
            self._let_in(at)
        load = slots.next(at)
        if load is None:
            return None, False
        pause_s = self._load_s * (1.0 if load[0].waiting else PREFETCH_PAUSE)
        busy = scheduler.running + scheduler.waiting > 0
        return load, busy and at < self._loaded_at + pause_s

    def _load(self, load: Load, at: float) -> None:
        """Begin to load an adapter."""
        self.slots.begin_load(*load)
        self._end = at + self._load_s

    def _look_ahead(self, at: float) -> None:
        """Load ahead of requests: at once where nobody is here, else the next step says."""
        load = self.slots.next(at)
        if load is None or load[0].waiting:
            return
        if self._live:
            self._cut(at)
        elif self._end == math.inf:
            self._load(load, at)

    def _let_in(self, at: float) -> None:
        """Who waited for an adapter that is loaded joins the queue."""
        for name in self.slots.admit_waiting(at):
            live = self._live[name]
            live.deferred = False
            self._scheduler.submit(live.request)

    def _leave(self, live: _Live, at: float) -> None:
        del self._ids[live.number]
        if live.adapter:
            self.slots.finish(live.adapter)
        self._events.append(Event(at, live.number, Kind.DONE, live.first_at, live.request.cached_tokens))

    def _cut(self, at: float) -> None:
        """Let a leap that is under way end with the step that is: another one begins after it."""
        if self._leap:
            steps = self._begun(at)
            if steps < self._leap:
                self._leap = steps
                self._due_tokens = steps * self._scheduler.running
                self._end = self._end_of(steps)
                if self._end <= at:
                    self._finish()

    def _end_of(self, steps: int) -> float:
        """When so many steps of the leap that is under way have ended."""
        return self._since + self._pace.lasts(steps)

    def _ended(self, at: float) -> int:
        """How many steps of the leap that is under way have ended."""
        steps = min(self._leap, self._pace.ended(at - self._since))
        while self._end_of(steps) > at:
            steps -= 1
        while steps < self._leap and self._end_of(steps + 1) <= at:
            steps += 1
        return steps

    def _begun(self, at: float) -> int:
        """How many steps of the leap that is under way have begun, before this instant."""
        steps = self._ended(at)
        return steps + (steps < self._leap and self._end_of(steps) < at)
