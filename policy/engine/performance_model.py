"""The engine model: how long one engine step takes.

One step with ``n`` scheduled tokens, ``K`` context tokens in KV and ``R`` running requests takes

    t(n, K, R) = o + [w^p + (c n)^p]^(1/p) + g K + r R

``w`` streams the weights, ``c n`` computes, and the soft maximum is the roofline's knee. At degree
``k`` the shares are ``w/k``, ``c/k`` and ``g/k``, plus ``2 L (a_k + b_k n)`` of all-reduce, which is
0 at ``k = 1``. Two all-reduces a layer: one after attention, one after the MLP.
"""

from __future__ import annotations

import math

import msgspec

BLOCK = 16  # vLLM's default block of KV cache, in tokens


class EngineModel(msgspec.Struct, frozen=True, kw_only=True):
    """The coefficients of one model on one kind of device.

    ``o`` seconds a step, ``w`` seconds to stream the weights, ``c`` seconds a scheduled token,
    ``g`` seconds a context token in KV, ``r`` seconds a running request, ``p`` the sharpness of the
    knee (no unit). All are for one device; ``degree`` is over how many the model is split: tensor
    parallel ranks, or cores of one CPU, whose ``allreduce_a`` and ``allreduce_b`` are 0.

    ``copy`` are the seconds that a token's KV takes from host memory to one device. The default is assumed:
    131,072 bytes a token (Llama 3.1 8B in bfloat16) over PCIe 4.0 x16 (32 GB/s).

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
    copy: float = 4.1e-6
    layers: int = 0
    allreduce_a: float = 0.0
    allreduce_b: float = 0.0
    degree: int = 1

    def __post_init__(self) -> None:
        if self.o + self.w <= 0 or self.degree < 1:
            raise ValueError("a step takes time (o + w > 0), on at least one device (degree >= 1)")

    def at_degree(self, degree: float) -> EngineModel:
        """The same on ``degree`` devices; a fraction of one gets this part of its time."""
        if degree < 1:
            w, c, g, copy = self.w / degree, self.c / degree, self.g / degree, self.copy / degree
            return msgspec.structs.replace(self, w=w, c=c, g=g, copy=copy, degree=1)
        return msgspec.structs.replace(self, degree=int(degree))

    def as_one_device(self) -> EngineModel:
        """The engine model at degree 1 with the same step times, within 3 %: all-reduce counts as compute."""
        k = self.degree
        if k == 1:
            return self
        per_token = 2 * self.layers * self.allreduce_b * 2 * (k - 1) / k
        return EngineModel(
            o=self.o + 2 * self.layers * self.allreduce_a,
            w=self.w / k,
            c=self.c / k + per_token,
            g=self.g / k,
            r=self.r,
            p=self.p,
            copy=self.copy / k,
            layers=self.layers,
        )

    def faster(self, speed: float) -> EngineModel:
        """The same model in a time that runs ``speed`` times as fast."""
        timed = ("o", "w", "c", "g", "r", "copy", "allreduce_a", "allreduce_b")
        return msgspec.structs.replace(self, **{name: getattr(self, name) / speed for name in timed})

    def step_time(self, tokens: float, kv_tokens: float, running: float) -> float:
        """Seconds of one step: t(n, K, R); the arguments are counts and may be means."""
        k = self.degree
        w, cn = self.w / k, self.c * tokens / k
        # Scaled by the larger term: a fourth power of a small time would lose its digits.
        top = max(w, cn)
        linear = top * (1.0 + (min(w, cn) / top) ** self.p) ** (1.0 / self.p) if top else 0.0
        return self.o + linear + self.g * kv_tokens / k + self.r * running + self._allreduce(tokens)

    def copy_s(self, tokens: int) -> float:
        """Seconds to copy the KV of ``tokens`` from host memory; each device copies its share."""
        return self.copy * tokens / self.degree

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


class BatchLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What bounds a step, in tokens, requests and KV tokens of one replica."""

    max_num_batched_tokens: int
    max_num_seqs: int
    kv_tokens: int


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """How fast one replica is, as far as it is known: its limits, and its coefficients if it has any."""

    limits: BatchLimits
    model: EngineModel | None = None


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
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


class MeanLatencySlo(msgspec.Struct, frozen=True, kw_only=True):
    """The mean TTFT and inter-token latency to stay within, in seconds."""

    ttft_s: float = math.inf
    itl_s: float = math.inf


class KvMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one device and what the model takes of it, all in bytes.

    ``device_bytes`` is M, ``usable`` the fraction u that the engine may take
    (``gpu_memory_utilization``), ``overhead_bytes`` A for activations and graphs on each device,
    ``weights_bytes`` W, ``bytes_per_token`` b_kv.
    """

    device_bytes: float
    overhead_bytes: float
    weights_bytes: float
    bytes_per_token: float
    usable: float = 0.9

    def replica_tokens(self, degree: float) -> int:
        """KV tokens of one replica on ``degree`` devices, in whole blocks; 0 when the weights do not fit.

        A fraction of a device has that part of its memory, and all of the overhead.
        """
        each = self.usable * min(1, degree) * self.device_bytes - self.overhead_bytes
        room = max(1, degree) * each - self.weights_bytes
        return max(0, int(room / self.bytes_per_token) // BLOCK * BLOCK)
