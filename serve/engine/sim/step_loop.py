"""The step loop of the simulated engine: a task that steps the scheduler and delivers tokens on time."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Hashable, Sequence
from dataclasses import dataclass

from policy.engine.batch_scheduler import BatchScheduler, EngineRequest, StepResult
from policy.engine.performance_model import BLOCK, BatchLimits, EngineModel
from policy.engine.prefix_cache import PrefixCache, block_hashes
from policy.errors import EngineFailed
from policy.routing.engine_prefix_index import KvBlockIndex
from serve.engine.interface import NAMED, EngineStats
from serve.engine.sim.metrics import SimEngineMetrics
from serve.engine.sim.pseudo_tokenizer import GeneratedText, TokenizedPrompt
from serve.engine.step_stats import StepStats

# A loop that is late catches up at most this much, so that tokens do not come in one burst.
MAX_LAG_S = 0.25
# Poll interval while waiting for the last request to end.
IDLE_S = 0.01


class RequestAborted(Exception):
    """The request was aborted because its client disconnected."""


class Generation:
    """One HTTP request in the engine: its choices and the tokens that are ready.

    ``model`` is its model's name in the answer. ``prompts`` and ``outputs`` run in parallel, one of each per
    choice; ``cached`` are the prompt tokens of each that were in the prefix cache, known from its first token
    on.
    """

    def __init__(
        self, loop: StepLoop, model: str, prompts: Sequence[TokenizedPrompt], outputs: Sequence[GeneratedText]
    ) -> None:
        self.model = model
        self.prompts = prompts
        self.outputs = outputs
        self.cached = [0] * len(outputs)
        self._loop = loop
        self._left = len(outputs)
        self._ready: deque[tuple[int, int]] = deque()
        self._more = asyncio.Event()
        self._done = asyncio.Event()
        self._error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended, successfully or not."""
        return self._done.is_set()

    def put(self, choice: int, position: int) -> None:
        """Token ``position`` of ``choice`` was generated."""
        self._ready.append((choice, position))
        self._more.set()
        if position + 1 == len(self.outputs[choice].deltas):
            self._left -= 1
            if not self._left:
                self._done.set()

    def fail(self, error: Exception) -> None:
        """End it: callers that wait for it get ``error``."""
        if not self.done:
            self._error = error
            self._done.set()
            self._more.set()

    def abort(self) -> None:
        """Remove it from the engine at once; no effect if it has ended."""
        if not self.done:
            self.fail(RequestAborted())
            self._loop.drop(self)

    async def finish(self) -> None:
        """Return when every choice is complete; raises :class:`RequestAborted` or EngineFailed."""
        await self._done.wait()
        if self._error is not None:
            raise self._error

    async def tokens(self) -> AsyncIterator[tuple[int, int]]:
        """(choice, position) of each token when it is generated; raises as :meth:`finish`."""
        while True:
            while self._ready and self._error is None:
                yield self._ready.popleft()
            if self.done:
                await self.finish()
                return
            self._more.clear()
            await self._more.wait()


@dataclass(slots=True)
class _Live:
    """A choice in the engine; instants are of the loop's clock."""

    request: EngineRequest
    generation: Generation
    choice: int
    arrived: float
    last: float = 0.0
    position: int = 0


class StepLoop:
    """Owns the scheduler. ``speed`` is the number of modelled seconds per real second.

    ``took`` holds the step times in real seconds. The changes of the ``cache`` go to the index ``blocks``.
    """

    def __init__(
        self,
        model: EngineModel,
        limits: BatchLimits,
        speed: float,
        metrics: SimEngineMetrics,
        cache: PrefixCache | None = None,
        *,
        blocks: KvBlockIndex | None = None,
    ) -> None:
        self._scheduler = BatchScheduler(model, limits, cache)
        self._cache = cache
        self._blocks = blocks
        self._kv_tokens = limits.kv_tokens
        self._speed = speed
        self._metrics = metrics
        self._names = itertools.count()
        self._live: dict[str, _Live] = {}
        self._holdups: deque[tuple[float, asyncio.Future[None]]] = deque()
        self._work = asyncio.Event()
        self._tokens = self._steps = self._preempted = 0
        self.took = StepStats()
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._run(), name="simulated engine")
        self._task.add_done_callback(self._ended)
        metrics.watch(self.stats)

    def stats(self) -> EngineStats:
        """The current counts; a request whose last token is in the running step still runs."""
        waiting = self._scheduler.waiting
        return EngineStats(
            running=len(self._live) - waiting,
            waiting=waiting,
            kv_used=self._scheduler.kv_used / self._kv_tokens,
            tokens=self._tokens,
            steps=self._steps,
            prefilling=self._scheduler.prefilling,
            preempted=self._preempted,
        )

    @property
    def ended(self) -> bool:
        """Whether the step task has ended."""
        return self._task.done()

    def check(self) -> None:
        """Raise :class:`policy.errors.EngineFailed` when the step task has ended."""
        if self.ended:
            error = None if self._task.cancelled() else self._task.exception()
            raise EngineFailed(f"the step loop of the simulated engine has ended: {error!r}")

    def submit(
        self, model: str, prompts: Sequence[TokenizedPrompt], outputs: Sequence[GeneratedText], salt: Hashable
    ) -> Generation:
        """Queue one choice for each prompt. Prompts with different salts share no blocks of the prefix cache.

        Raises EngineFailed when the engine is dead, :class:`ValueError` as the scheduler does.
        """
        self.check()
        generation = Generation(self, model, prompts, outputs)
        now = self._loop.time()
        for choice, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            name = str(next(self._names))
            blocks = () if self._cache is None else block_hashes(prompt.tokens, salt)
            request = EngineRequest(name, len(prompt.tokens), len(output.deltas), blocks=blocks)
            self._scheduler.submit(request)
            self._live[name] = _Live(request, generation, choice, now)
            named = NAMED.get()
            if self._blocks is None or named is None:
                continue
            if self._blocks.name(named, blocks, len(prompt.tokens)):
                # After lost events, as vLLM on request: what the prompt finds.
                self._blocks.stored(blocks[: request.cached_tokens // BLOCK])
        self._work.set()
        return generation

    def drop(self, generation: Generation) -> None:
        """Remove the unfinished choices of ``generation``."""
        for name in [name for name, live in self._live.items() if live.generation is generation]:
            self._scheduler.abort(name)
            del self._live[name]
            self._metrics.success("abort")

    async def hold_up(self, duration_s: float) -> None:
        """Block the loop for ``duration_s`` modelled seconds between two steps, for work other than steps.

        Raises EngineFailed when the engine is dead.
        """
        self.check()
        done: asyncio.Future[None] = self._loop.create_future()
        self._holdups.append((duration_s, done))
        self._work.set()
        await done

    async def idle(self) -> None:
        """Return when nothing is queued or runs; raises EngineFailed when the engine is dead."""
        while self._live:
            self.check()
            await asyncio.sleep(IDLE_S)
        self.check()

    async def close(self) -> None:
        """End the task; remaining requests fail. :meth:`check` reports an error that ended it before."""
        self._task.cancel()
        await asyncio.wait([self._task])

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        for live in self._live.values():
            live.generation.fail(EngineFailed(f"the engine ended: {error!r}"))
        self._live.clear()
        for _, done in self._holdups:
            if not done.done():
                done.set_exception(EngineFailed(f"the engine ended: {error!r}"))
        self._holdups.clear()

    async def _run(self) -> None:
        due = self._loop.time()
        while True:
            if not self._live and not self._holdups:
                self._work.clear()
                await self._work.wait()
                due = self._loop.time()
            while self._holdups:
                duration_s, done = self._holdups[0]
                due = await self._pass(due, duration_s)
                self._holdups.popleft()
                if not done.done():
                    done.set_result(None)
            if self._live:
                held = self._scheduler.kv_used
                result = self._scheduler.step()
                self.report_cache()
                due = await self._pass(due, result.duration_s)
                self._deliver(result)
                # KV use during the step: finished requests have released theirs by now. The loop's
                # clock has a resolution of milliseconds only.
                kv_tokens = max(held + result.scheduled, result.kv_used)
                self.took.ended(
                    time.perf_counter(), result.scheduled, kv_tokens, result.running, goes_on=bool(self._live)
                )

    def report_cache(self) -> None:
        """Tell the index what the cache has stored and removed."""
        if self._cache is None or self._blocks is None:
            return
        for block, parent, stored, host in self._cache.take_changes():
            assert isinstance(block, int)
            if not stored:
                self._blocks.removed(block, host=host)
            elif not host or self._blocks.holds(block):  # what moves is known by its place
                self._blocks.stored((block,), parent if isinstance(parent, int) else 0, host=host)

    async def _pass(self, due: float, duration_s: float) -> float:
        """Sleep for modelled seconds after ``due``; the instant when they were due to end.

        Sleeping until an instant, not for a duration, keeps the pace over many steps.
        """
        due = max(due + duration_s / self._speed, self._loop.time() - MAX_LAG_S)
        await asyncio.sleep(max(0.0, due - self._loop.time()))
        return due

    def _deliver(self, result: StepResult) -> None:
        metrics, now = self._metrics, self._loop.time()
        self._steps += 1
        self._tokens += result.scheduled
        self._preempted += len(result.preempted)
        metrics.iteration.observe(result.scheduled)
        metrics.preemptions.inc(len(result.preempted))
        produced = 0
        for name in result.tokens:
            live = self._live.get(name)
            if live is None:
                continue
            produced += 1
            generation = live.generation
            if live.position:
                metrics.itl.observe(now - live.last)
            else:
                metrics.ttft.observe(now - live.arrived)
                request = live.request
                generation.cached[live.choice] = request.cached_tokens
                metrics.prompt_tokens.inc(request.prompt_tokens)
                if self._cache is not None:
                    metrics.prefix_queries.inc(request.prompt_tokens)
                    metrics.prefix_hits.inc(request.cached_tokens)
            live.last = now
            generation.put(live.choice, live.position)
            live.position += 1
        metrics.generation_tokens.inc(produced)
        for name in result.finished:
            if (live := self._live.pop(name, None)) is not None:
                metrics.e2e.observe(now - live.arrived)
                metrics.success(live.generation.outputs[live.choice].finish_reason)
