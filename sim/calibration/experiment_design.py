"""Load points that identify the coefficients of an engine, and closed-loop clients that drive them."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import NamedTuple

from policy.engine.batch_scheduler import BatchScheduler, EngineRequest
from policy.engine.performance_model import BatchLimits, EngineModel, MeanLatencySlo

# The most points, and of how many one is held out.
POINTS = 16
HELD_EVERY = 3
# The fraction of a point's time for one round of its clients, so that some rounds end in it.
_ROUND = 0.4
_MOST_CLIENTS = 256
# Up to so many clients every count is a point, beyond that the doublings.
_FEW = 5
_OUTPUTS = (4, 32)
_SHORTEST = 16
# The usable fraction of KV cache and context: prompts turn out a little longer than planned.
_ROOM = 0.8
SHORTEST_S = 1.0
ANY = MeanLatencySlo()


class CalibrationPoint(NamedTuple):
    """``concurrency`` closed-loop clients per replica with requests of these token counts.

    A point that is ``held`` out takes no part in the fit.
    """

    concurrency: int
    input_tokens: int
    output_tokens: int
    held: bool = False

    @property
    def description(self) -> str:
        clients = "1 client" if self.concurrency == 1 else f"{self.concurrency} clients"
        return f"{clients}, {self.input_tokens} tokens in, {self.output_tokens} out"


class PlannedPoints(NamedTuple):
    """Load points in the order in which they are driven, each for ``point_s`` seconds."""

    points: list[CalibrationPoint]
    point_s: float


def share_time(
    plan: Callable[[float], list[CalibrationPoint]], seconds: float, between_s: float
) -> PlannedPoints:
    """The points of ``plan`` for the duration of each, so that all share ``seconds``.

    Fewer points last longer, which makes more points possible. ``between_s`` seconds pass after each.
    """
    for count in range(1, POINTS + 1):
        point_s = max(SHORTEST_S, seconds / count - between_s)
        points = plan(point_s)
        if len(points) <= count:
            break
    return PlannedPoints(points, point_s)


def plan_points(
    model: EngineModel,
    limits: BatchLimits,
    *,
    max_model_len: int,
    bound: int,
    point_s: float,
    slo: MeanLatencySlo = ANY,
) -> list[CalibrationPoint]:
    """At most :data:`POINTS` points for a replica that ``model`` roughly describes.

    ``bound`` is the replica's concurrency limit, ``point_s`` the seconds per point; only a single client may
    miss ``slo``. Prompts have three lengths, with one client up to as many as fit in memory and time. Light
    and heavy points alternate, so that drift affects all alike. The lightest and heaviest point of each
    length are never held out: the held-out points test interpolation.
    """
    longest = max(_SHORTEST, int(_ROOM * max_model_len) - _OUTPUTS[1])
    middle = round((_SHORTEST * longest) ** 0.5)
    found: list[CalibrationPoint] = []
    for length in sorted({_SHORTEST, middle, longest}):
        fitting = [
            point
            for clients in _counts(min(limits.max_num_seqs, bound, _MOST_CLIENTS))
            if clients == 1 or _within(model, limits, slo, clients, length)
            if (point := _point(model, limits, clients, length, point_s)) is not None
        ]
        fitting = _thinned(fitting, POINTS // 2 if length == _SHORTEST else POINTS // 4)
        inner = range(1, len(fitting) - 1)
        held = {i for i in inner if i % HELD_EVERY == 1}
        found += [point._replace(held=i in held) for i, point in enumerate(fitting)]
    return [found[i] for i in sorted(range(len(found)), key=lambda i: (i % 3, i))]


def _counts(most: int) -> list[int]:
    """1, 2, 4 and so on up to ``most``; all counts of a small ``most``."""
    if most <= _FEW:
        return list(range(1, most + 1))
    return [1 << i for i in range(most.bit_length() - 1)] + [most]


def _within(model: EngineModel, limits: BatchLimits, slo: MeanLatencySlo, clients: int, length: int) -> bool:
    """Whether the clients are served within ``slo`` even if all their prompts arrive at once."""
    step_s = model.step_time(clients, clients * length, clients)
    return (
        step_s <= slo.itl_s and model.prefill_s(clients * length, limits.max_num_batched_tokens) <= slo.ttft_s
    )


def _point(
    model: EngineModel, limits: BatchLimits, clients: int, length: int, point_s: float
) -> CalibrationPoint | None:
    """The longest answers whose rounds end in time; ``None`` where the shortest do not fit."""
    step_s = model.step_time(clients, clients * length, clients)
    prefill_s = model.prefill_s(clients * length, limits.max_num_batched_tokens)
    outputs = min(int((_ROUND * point_s - prefill_s) / step_s), _OUTPUTS[1])
    if outputs < _OUTPUTS[0] or clients * (length + outputs) > _ROOM * limits.kv_tokens:
        return None
    return CalibrationPoint(clients, length, outputs)


def _thinned(points: list[CalibrationPoint], most: int) -> list[CalibrationPoint]:
    """At most ``most`` points, evenly spaced, with the first and the last."""
    if len(points) <= most:
        return points
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]


# Simultaneous requests are staggered: an idle engine begins with the first alone.
APART_S = 1e-3


class RequestLatency(NamedTuple):
    """One finished request: TTFT and mean ITL in seconds."""

    ttft_s: float
    itl_s: float


def closed_loop(
    model: EngineModel, limits: BatchLimits, point: CalibrationPoint, seconds: float, path_s: float = 0.0
) -> list[RequestLatency]:
    """The requests that end within ``seconds`` of a point, in order of completion.

    ``path_s`` is the round trip to the engine: a next request misses the step that begins when the one before
    it ends.
    """
    scheduler = BatchScheduler(model, limits)
    coming = [(path_s / 2 + APART_S * client, client) for client in range(point.concurrency)]
    began: dict[str, float] = {}
    first: dict[str, float] = {}
    found: list[RequestLatency] = []
    now, number = 0.0, 0
    while now < seconds:
        if not scheduler.running and not scheduler.waiting:
            now = max(now, coming[0][0])
        while coming and coming[0][0] <= now:
            at, _ = heappop(coming)
            began[str(number)] = at
            scheduler.submit(EngineRequest(str(number), point.input_tokens, point.output_tokens))
            number += 1
        step = scheduler.step()
        now += step.duration_s
        for name in step.tokens:
            first.setdefault(name, now)
        for place, name in enumerate(step.finished):
            if now + path_s / 2 <= seconds:
                itl_s = (now - first[name]) / max(point.output_tokens - 1, 1)
                found.append(RequestLatency(first[name] - began[name] + path_s, itl_s))
            del began[name]
            heappush(coming, (now + path_s + APART_S * place, number))
    return found
