"""A queueing model of one engine with Poisson arrivals: means and variances of its latencies.

Steps with a prompt are slower than others, the number of running requests is Poisson distributed, and slow
steps collect more of both. Everything but the fixed point of the mean inter-token gap has a closed form, so
one evaluation takes about 40 us.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

from policy.engine.performance_model import EngineLoad, EngineModel, Timing
from policy.engine.prefill_estimate import GENERIC

# Standard deviations from a mean to the 95th percentile: between a uniform's 1.56 and an exponential's 2.
_Z = 1.7
# Limit of the feedback of a fluctuation: more requests make steps longer and so stay longer.
_MOST_GAIN = 5.0
_NORMAL = NormalDist()
_PRECISION = 1e-3
# No variance grows by more than this as it feeds on itself, and no queue is longer than of so full an engine.
_MOST_GROWTH = 20.0
_FULLEST = 0.98
_PROMPT_PRECISION = 1e-5

Step = Callable[[float, float, float], float]


@dataclass(slots=True, frozen=True)
class DurationMoments:
    """A duration: its mean and standard deviation in seconds."""

    mean: float
    deviation: float

    @property
    def p95(self) -> float:
        return self.mean + _Z * self.deviation

    def within(self, most: float | None) -> float:
        """The fraction that is at most ``most``; consistent with the percentile."""
        if most is None:
            return 1.0
        if self.deviation <= 0.0:
            return 1.0 if self.mean <= most else 0.0
        return _NORMAL.cdf((most - self.mean) / self.deviation * 1.6449 / _Z)


@dataclass(slots=True)
class SteadyState:
    """The steady state at a rate ``lam``, as seen by a decoding request with ``others`` beside it.

    A step takes ``fast`` seconds without a prompt and ``slow`` with ``tokens`` of prompts, which the fraction
    ``mixed`` of steps has; ``gap`` is the mean. A batch has ``room`` tokens beside the decodes, a prompt
    needs ``chunks`` of it, ``begun`` prompts arrive in a mean step. ``feedback`` is the elasticity of the gap
    to the number of running requests, ``gain`` the resulting amplification of fluctuations.
    """

    lam: float
    others: float
    fast: float
    slow: float
    tokens: float
    mixed: float
    gap: float
    room: float
    chunks: float
    begun: float
    feedback: float = 0.0
    gain: float = 1.0


class EngineLatencyModel:
    """One engine with Poisson arrivals; ``edge`` is its maximum rate in requests per second."""

    def __init__(self, timing: Timing, load: EngineLoad) -> None:
        limits, model = timing.limits, timing.model or GENERIC.model
        assert model is not None
        self._step = _step_of(model)
        self._batch = float(limits.max_num_batched_tokens)
        self._prompt = max(load.uncached_tokens, 1.0)
        self._output = max(load.output_tokens, 1.0)
        # What a request holds in KV on average while it decodes.
        self._context = max(load.input_tokens, 1.0) + self._output / 2
        # As many as fit when each is whole: with more, those that are preempted compute their KV again.
        whole = max(load.input_tokens, 1.0) + self._output
        fits = limits.kv_tokens / whole if limits.kv_tokens else math.inf
        self._seats = min(limits.max_num_seqs, fits)
        self._most = min(self._seats, self._batch / (1.0 + self._prompt / self._output))
        crowd = self._most + 1.0
        self._longest = 1.01 * self._step(
            self._batch + crowd, crowd * self._context + self._batch, crowd + 1.0
        )
        self.edge = self._edge() if self._most > 0.0 else 0.0

    def _edge(self) -> float:
        """The rate with as many running requests as possible, each replaced when it ends."""
        running, begun = self._most, self._most / self._output
        room = max(self._batch - running, 1.0)
        mixed = min(1.0, max(1.0 - math.exp(-begun), begun * self._prompt / room))
        tokens, kv = min(room, self._prompt * begun / mixed), running * self._context
        fast = self._step(running, kv, running)
        slow = self._step(running + tokens, kv, running)
        return running / (self._output * (fast + mixed * (slow - fast)))

    def settle(self, lam: float) -> SteadyState:
        """The fixed point of the mean gap at ``lam``; without one, the state at full concurrency."""
        low = self._step(1.0, self._context, 1.0)
        high = min(self._most / (lam * self._output), self._longest) if lam > 0.0 else low
        point = self._at(lam, high)
        if high > low and point.gap < high:
            point = self._root(lam, low, self._at(lam, low).gap - low, high, point.gap - high)
        # Of the smallest rates the product underflows to 0.
        if point.begun > 0.0:
            gap = point.begun / lam
            nudged = self._at(lam, gap * 1.01)
            point.feedback = max(0.0, (nudged.gap - point.gap) / (0.01 * gap))
        point.gain = min(_MOST_GAIN, 1.0 / max(1.0 - point.feedback, 1e-9))
        return point

    def _root(self, lam: float, low: float, above: float, high: float, below: float) -> SteadyState:
        """The fixed point between ``low`` and ``high``, by false position (Illinois variant)."""
        side = 0
        while True:
            gap = (low * below - high * above) / (below - above)
            point = self._at(lam, gap)
            excess = point.gap - gap
            if abs(excess) <= _PRECISION * gap or high - low <= _PRECISION * low:
                return point
            if excess > 0.0:
                low, above = gap, excess
                below = below / 2 if side > 0 else below
                side = 1
            else:
                high, below = gap, excess
                above = above / 2 if side < 0 else above
                side = -1

    def _at(self, lam: float, gap: float) -> SteadyState:
        """The state that follows from a mean gap of ``gap`` seconds."""
        prompt, step = self._prompt, self._step
        others = min(lam * self._output * gap, self._most)
        running = 1.0 + others
        kv = running * self._context
        room = max(self._batch - running, 1.0)
        chunks = prompt / room
        fast = step(running, kv, running)
        begun = lam * gap
        if chunks > 1.0:
            tokens = room
            slow = step(running + tokens, kv + tokens, running + 1.0)
            mixed = self._chunked(lam, fast, slow, chunks)
        else:
            mixed = max(-math.expm1(-begun), begun * chunks, 1e-12)
            tokens = min(room, prompt * begun / mixed)
            slow = step(running + tokens, kv + tokens, running + 1.0)
            # Long steps gather prompts for the next one, so that fewer have any, and those have more.
            after_fast, after_slow = -math.expm1(-lam * fast), -math.expm1(-lam * slow)
            mixed = min(1.0, max(after_fast / (1.0 - after_slow + after_fast), begun * chunks, 1e-12))
            tokens = min(room, prompt * begun / mixed)
            slow = step(running + tokens, kv + tokens, running + 1.0)
        gap = fast + mixed * (slow - fast)
        return SteadyState(lam, others, fast, slow, tokens, mixed, gap, room, chunks, begun)

    def _chunked(self, lam: float, fast: float, slow: float, chunks: float) -> float:
        """The fraction of a request's decode steps with a chunk, where prompts take several chunks.

        Prompts run one after the other: a request that waited sees those of the M/D/1 queue behind it first.
        """
        work = lam * chunks
        spare = 1.0 - work * (slow - fast)
        mixed = min(1.0, work * fast / spare) if spare > 0.0 else 1.0
        busy = min(work * slow, 0.95)
        behind = busy + busy * busy / (2.0 * (1.0 - busy))
        return mixed + (1.0 - mixed) * min(1.0, behind * chunks / (1.0 - busy) / self._output)

    def itl(self, at: SteadyState) -> DurationMoments:
        """The mean gap of a stream; it varies with concurrent requests and arriving prompts.

        Both are correlated Poisson counts, averaged over the length of the stream. An answer of one token,
        or a vector, has no gap.
        """
        if self._output <= 1.0:
            return DurationMoments(0.0, 0.0)
        grows = self._step(at.others + 2.0, (at.others + 2.0) * self._context, at.others + 2.0) - at.fast
        share = self._extra_s(at) / self._output
        clumps = 1.0
        if at.chunks > 1.0:
            # Prompts that take several steps come in the rows in which they queued.
            clumps = 1.0 / (1.0 - min(at.lam * at.chunks * at.slow, 0.95))
        variance = at.others * (grows * grows * 2.0 / 3.0 + grows * share + clumps * share * share)
        # No stream is slower than with as many as can run, for as long as it lasts.
        worst = self._most / (self._output * self.edge)
        return DurationMoments(at.gap, min(math.sqrt(variance) * at.gain, max(worst - at.gap, 0.0) / _Z))

    def ttft(self, at: SteadyState) -> DurationMoments:
        """The rest of the running step, the steps of the prompt, and the queue ahead."""
        mean_2 = at.fast**2 + at.mixed * (at.slow**2 - at.fast**2)
        mean_3 = at.fast**3 + at.mixed * (at.slow**3 - at.fast**3)
        runs = -math.expm1(-at.others - at.lam * self._extra_s(at))
        residual = runs * mean_2 / (2.0 * at.gap)
        variance = runs * mean_3 / (3.0 * at.gap) - residual**2
        own, alone = self._own_s(at, mean_2)
        if at.chunks > 1.0:
            busy = min(at.lam * at.chunks * at.slow, 0.95)
            waits, wait = busy, own / (2.0 * (1.0 - busy))
        else:
            variance += (own - at.fast) * (own - alone)
            busy = min(at.begun * at.chunks, 0.95)
            waits, wait = busy ** (1.0 / at.chunks), alone / (2.0 * (1.0 - busy))
        # Concurrent requests make each step of the prompt longer.
        crowd = math.sqrt(at.others) * at.gain
        if at.others > 0.0:
            variance += (own * at.feedback / at.others * crowd) ** 2
        full, seat = 0.0, 0.0
        if crowd > 0.0:
            full = 1.0 - _NORMAL.cdf((self._most - at.others) / crowd)
            if at.chunks > 1.0:
                # With a prompt in every step the batch lets no more begin: that row is waited for already.
                seated = 1.0 - _NORMAL.cdf((self._seats - at.others) / crowd)
                full += (seated - full) * at.mixed**4
            seat = 0.8 / max(self.edge - at.lam, 0.01 * self.edge)
        variance += (2.0 - waits) * waits * wait**2 + (2.0 - full) * full * seat**2
        found = DurationMoments(residual + own + waits * wait + full * seat, math.sqrt(variance))
        if at.chunks > 1.0:
            return found
        # Above, what runs decodes; the fewer tokens are asked for, the more of it are prompts.
        mean, variance = _prompt_steps(self._step, self._prompt, self._batch, at.lam)
        part = 2.0 / (1.0 + self._output)
        deviation = found.deviation + part * (math.sqrt(variance) - found.deviation)
        return DurationMoments(found.mean + part * (mean - found.mean), deviation)

    def gap_p95_s(self, at: SteadyState) -> float:
        """The 95th percentile of single gaps."""
        if self._output <= 1.0:
            return 0.0
        deviation = math.sqrt(at.others) * at.gain
        if at.mixed < 0.05:
            crowd = 1.0 + at.others + _NORMAL.inv_cdf(min(0.95 / (1.0 - at.mixed), 0.9999)) * deviation
            return min(self._step(crowd, crowd * self._context, crowd), at.slow)
        part = 1.0 - 0.05 / at.mixed
        # Half of it, for the crowd and the prompts are seldom at their worst together.
        crowd = max(1.0, 1.0 + at.others + 0.5 * _NORMAL.inv_cdf(max(part, 1e-4)) * deviation)
        tokens = at.tokens
        if at.chunks <= 1.0:
            tokens = min(at.room, self._prompt * _of_some(at.tokens / self._prompt, part))
        return self._step(crowd + tokens, crowd * self._context + tokens, crowd + 1.0)

    def _extra_s(self, at: SteadyState) -> float:
        """Seconds by which one prompt makes the steps of all others longer."""
        return (at.slow - at.fast) * at.mixed / at.begun if at.begun else 0.0

    def _own_s(self, at: SteadyState, mean_2: float) -> tuple[float, float]:
        """Seconds of the steps of a prompt: with the others that came in the same step, and alone."""
        others, prompt, held = at.others, self._prompt, at.others * self._context
        if at.chunks <= 1.0:
            together = min(at.room, prompt * (1.0 + at.lam * mean_2 / at.gap))
            return (
                self._step(others + together, held + prompt, others + 1.0),
                self._step(others + prompt, held + prompt, others + 1.0),
            )
        full = math.floor(at.chunks)
        rest = prompt - full * at.room
        own = full * self._step(others + at.room, held + prompt / 2, others + 1.0)
        if rest > 0.0:
            own += self._step(others + rest, held + prompt, others + 1.0)
        return own, own


def _of_some(mean: float, part: float) -> int:
    """The quantile of a Poisson variable conditioned on being at least 1, with this mean."""
    rate = mean = max(mean, 1.0 + 1e-6)
    for _ in range(20):
        rate = mean * -math.expm1(-rate)
    count, chance, total = 0, math.exp(-rate), 0.0
    scale = -math.expm1(-rate)
    while total < part and count < 1000:
        count += 1
        chance *= rate / count
        total += chance / scale
    return max(count, 1)


def _step_of(model: EngineModel) -> Step:
    """The model's step time as a function of tokens, KV tokens and running requests, made faster."""
    k = model.degree
    o, w, c, g, r, p = model.o, model.w / k, model.c / k, model.g / k, model.r, model.p
    if k > 1:
        o += 2 * model.layers * model.allreduce_a
        a_token = 2 * model.layers * model.allreduce_b * 2 * (k - 1) / k
    else:
        a_token = 0.0

    def step(tokens: float, kv_tokens: float, running: float) -> float:
        computed = c * tokens
        top, ratio = (w, computed / w) if w > computed else (computed, w / computed if computed else 0.0)
        linear: float = top * (1.0 + ratio**p) ** (1.0 / p)
        return o + linear + a_token * tokens + g * kv_tokens + r * running

    return step


def _prompt_steps(step: Step, prompt: float, batch: float, lam: float) -> tuple[float, float]:
    """Mean and variance (seconds) of the TTFT of an engine that computes prompts in every step.

    ``lam`` prompts of ``prompt`` tokens arrive per second; one fits into a step of ``batch`` tokens. Without
    decodes (vectors, answers of one token) each step serves the prompts that arrived in the last one, so the
    variance of their number feeds on itself.
    """
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
    """The step length at which a step holds the arrivals of one step, or one arrival at an idle engine.

    Newton's method from below, which does not pass the root of a convex function.
    """

    def excess(seconds: float) -> float:
        return lasts(lam * seconds + math.exp(-lam * seconds)) - seconds

    seconds = alone
    for _ in range(30):
        above = excess(seconds)
        if above <= _PROMPT_PRECISION * seconds:
            break
        nudge = 1e-3 * seconds
        slope = (excess(seconds + nudge) - above) / nudge
        if slope >= 0.0:
            return longest
        seconds = min(seconds - above / slope, longest)
    return seconds
