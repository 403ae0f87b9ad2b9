"""The engine model: how long one engine step takes, and what rate an engine carries within an SLO.

One step with ``n`` scheduled tokens, ``K`` context tokens in KV and ``R`` running requests takes

    t(n, K, R) = o + [w^p + (c n)^p]^(1/p) + g K + r R

``w`` streams the weights, ``c n`` computes, and the soft maximum is the roofline's knee. At degree
``k`` the shares are ``w/k``, ``c/k`` and ``g/k``, plus ``2 L (a_k + b_k n)`` of all-reduce, which is
0 at ``k = 1``. Two all-reduces a layer: one after attention, one after the MLP.
"""

from __future__ import annotations

import math

import msgspec


class EngineModel(msgspec.Struct, frozen=True, kw_only=True):
    """The coefficients of one model on one kind of device.

    ``o`` seconds a step, ``w`` seconds to stream the weights, ``c`` seconds a scheduled token,
    ``g`` seconds a context token in KV, ``r`` seconds a running request, ``p`` the sharpness of the
    knee (no unit). All are for one device; ``degree`` is over how many the model is split: tensor
    parallel ranks, or cores of one CPU, whose ``allreduce_a`` and ``allreduce_b`` are 0.

    ``layers`` is L. ``allreduce_a`` is a_k, the seconds one all-reduce takes to begin;
    ``allreduce_b`` the seconds one token's activations take over one link, of which a ring of k
    moves 2 (k - 1) / k, so ``b_k = allreduce_b * 2 (k - 1) / k``.
    """

    o: float
    w: float
    c: float
    g: float
    r: float
    p: float = 4.0
    layers: int = 0
    allreduce_a: float = 0.0
    allreduce_b: float = 0.0
    degree: int = 1

    def __post_init__(self) -> None:
        if self.o + self.w <= 0 or self.degree < 1:
            raise ValueError("a step takes time (o + w > 0), on at least one device (degree >= 1)")

    def at_degree(self, degree: int) -> EngineModel:
        """The same model split over ``degree`` devices."""
        return msgspec.structs.replace(self, degree=degree)

    def faster(self, speed: float) -> EngineModel:
        """The same model in a time that runs ``speed`` times as fast."""
        return msgspec.structs.replace(
            self,
            o=self.o / speed,
            w=self.w / speed,
            c=self.c / speed,
            g=self.g / speed,
            r=self.r / speed,
            allreduce_a=self.allreduce_a / speed,
            allreduce_b=self.allreduce_b / speed,
        )

    def step_time(self, tokens: float, kv_tokens: float, running: float) -> float:
        """Seconds of one step: t(n, K, R); the arguments are counts and may be means."""
        k = self.degree
        w, cn = self.w / k, self.c * tokens / k
        # Scaled by the larger term: a fourth power of a small time would lose its digits.
        top = max(w, cn)
        linear = top * (1.0 + (min(w, cn) / top) ** self.p) ** (1.0 / self.p) if top else 0.0
        return self.o + linear + self.g * kv_tokens / k + self.r * running + self._allreduce(tokens)

    def prefill_s(self, tokens: int, chunk: int, kv_tokens: float = 0.0, running: int = 0) -> float:
        """Seconds until a prompt of ``tokens`` uncached tokens has run, in chunks, beside others.

        ``chunk`` is max_num_batched_tokens, of which ``running`` decodes take one token each;
        ``kv_tokens`` is their context. Raises :class:`ValueError` when they leave no room.
        """
        room = chunk - running
        if room < 1:
            raise ValueError(f"{running} running requests leave no room in {chunk} batched tokens")
        total, done = 0.0, 0
        while done < tokens:
            part = min(room, tokens - done)
            done += part
            total += self.step_time(running + part, kv_tokens + done, running + 1)
        return total

    def _allreduce(self, tokens: float) -> float:
        k = self.degree
        if k == 1:
            return 0.0
        return 2 * self.layers * (self.allreduce_a + self.allreduce_b * 2 * (k - 1) / k * tokens)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What bounds a step, in tokens, requests and KV tokens of one replica."""

    max_num_batched_tokens: int
    max_num_seqs: int
    kv_tokens: int


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """How fast one replica is, as far as it is known: its limits, and its coefficients if it has any."""

    limits: Limits
    model: EngineModel | None = None


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Requests at one replica.

    ``lam`` requests per second, ``input_tokens`` (I) and ``output_tokens`` (O) the means per
    request, ``hit`` (h) the fraction of the prompt found in the prefix cache.
    """

    lam: float
    input_tokens: float
    output_tokens: float
    hit: float = 0.0

    @property
    def uncached_tokens(self) -> float:
        """I (1 - h): prompt tokens that must be computed, per request."""
        return self.input_tokens * (1.0 - self.hit)


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """The mean TTFT and inter-token latency to stay within, in seconds."""

    ttft_s: float = math.inf
    itl_s: float = math.inf


class Steady(msgspec.Struct, frozen=True, kw_only=True):
    """The fixed point: means of running requests, of tokens per step and of KV tokens, and the
    latencies in seconds that follow."""

    running: float
    tokens_per_step: float
    kv_tokens: float
    itl_s: float
    ttft_s: float


def steady(model: EngineModel, load: Workload, limits: Limits, wait_s: float = 0.0) -> Steady | None:
    """Where the engine settles under ``load``, or ``None`` when it cannot keep up.

    Solves ``t = t(n, K, B)`` with ``B = lam O t``, ``n = B + lam t I (1 - h)``, ``K = B (I + O/2)``.
    Feasible iff ``n <= max_num_batched_tokens`` and ``B <= min(max_num_seqs, KV / (I + O))``.
    Then ITL = t and TTFT = ``wait_s`` + t ceil(I (1 - h) / max_num_batched_tokens).

    Means hide bursts, so this is a lower bound that gets looser with load. Against
    :mod:`policy.engine.scheduler` with Poisson arrivals (h100-8b, 1000 in, 150 out) ITL is 3 % low at 0.05
    of the feasible rate, 27 % at 0.45 and 48 % at 0.9. TTFT counts mean steps where a prompt's own are
    long, and is low 4 to 6 times: :meth:`EngineModel.prefill_s` times those, within 20 % of the
    scheduler's up to 0.2 of the feasible rate.
    """
    t = _fixed_point(model, load)
    if t is None:
        return None
    running, tokens, kv = _state(load, t)
    fits = limits.kv_tokens / (load.input_tokens + load.output_tokens)
    if tokens > limits.max_num_batched_tokens or running > min(limits.max_num_seqs, fits):
        return None
    chunks = math.ceil(load.uncached_tokens / limits.max_num_batched_tokens)
    return Steady(running=running, tokens_per_step=tokens, kv_tokens=kv, itl_s=t, ttft_s=wait_s + t * chunks)


def feasible_rate(
    model: EngineModel, load: Workload, limits: Limits, slo: Slo, *, wait_s: float = 0.0
) -> float:
    """mu: the largest rate in requests per second that is feasible and within ``slo``; 0 if none.

    ``load.lam`` is not read. Every term grows with the rate, so bisection finds the edge, to a
    relative 1e-9 from below.
    """

    def carries(lam: float) -> bool:
        state = steady(model, msgspec.structs.replace(load, lam=lam), limits, wait_s)
        return state is not None and state.itl_s <= slo.itl_s and state.ttft_s <= slo.ttft_s

    # No step is shorter than an empty one, and none schedules more than the batch holds.
    per_request = load.output_tokens + load.uncached_tokens
    high = limits.max_num_batched_tokens / (per_request * model.step_time(0, 0, 0))
    if carries(high):
        return high
    low = 0.0
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if carries(middle) else (low, middle)
        if high < 1e-12:
            return 0.0
    return low


def crossover_utilisation(speed_up: float, arrival_cv2: float, service_cv2: float) -> float:
    """rho*: the utilisation above which many small replicas beat one that is ``speed_up`` times faster.

    ``rho* = z / (1 + z)``, ``z = 2 (K - 1) / (Ca^2 + Cs^2)``; the other arguments are the squared
    coefficients of variation of the inter-arrival and service times. Where the large one's service
    and wait, by Kingman's formula, equal the service of small ones that do not queue.
    """
    z = 2.0 * (speed_up - 1.0) / (arrival_cv2 + service_cv2)
    return z / (1.0 + z)


def _state(load: Workload, t: float) -> tuple[float, float, float]:
    """B, n and K when a step takes ``t`` seconds."""
    running = load.lam * load.output_tokens * t
    tokens = running + load.lam * t * load.uncached_tokens
    return running, tokens, running * (load.input_tokens + load.output_tokens / 2)


def _fixed_point(model: EngineModel, load: Workload) -> float | None:
    """The least t with f(t) = t, f(t) being the step time at the state that t implies; seconds.

    f is convex and increasing, so Newton's steps on f(t) - t from below never pass the least root,
    and a slope of 1 or more below it means that there is none.
    """

    def excess(t: float) -> float:
        running, tokens, kv = _state(load, t)
        return model.step_time(tokens, kv, running) - t

    t = model.step_time(0, 0, 0)
    for _ in range(200):
        gap = excess(t)
        if gap <= 1e-13 * t:
            return t
        # Behind t, not ahead: a convex function's slope is then never overestimated.
        nudge = 1e-6 * t
        slope = (gap - excess(t - nudge)) / nudge
        if slope >= 0:
            return None
        t -= gap / slope
    return None
