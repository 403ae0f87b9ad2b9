"""Closed-loop clients of a simulated engine: each sends its next request when its last has ended."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

from policy.engine.model import EngineModel, Limits
from policy.engine.scheduler import Request, Scheduler
from sim.calibration.load_points import Point

# Of requests that are sent at the same moment an engine that was idle begins with the first alone.
APART_S = 1e-3


class Latency(NamedTuple):
    """One request that ended: seconds to its first token, and between two of the others."""

    ttft_s: float
    itl_s: float


def closed_loop(
    model: EngineModel, limits: Limits, point: Point, seconds: float, path_s: float = 0.0
) -> list[Latency]:
    """The requests that end within ``seconds`` of a point, in the order in which they do.

    The way to the engine and back takes ``path_s`` seconds: a next request misses the step that begins when
    the one before it ended.
    """
    scheduler = Scheduler(model, limits)
    coming = [(path_s / 2 + APART_S * client, client) for client in range(point.concurrency)]
    began: dict[str, float] = {}
    first: dict[str, float] = {}
    found: list[Latency] = []
    now, number = 0.0, 0
    while now < seconds:
        if not scheduler.running and not scheduler.waiting:
            now = max(now, coming[0][0])
        while coming and coming[0][0] <= now:
            at, _ = heappop(coming)
            began[str(number)] = at
            scheduler.submit(Request(str(number), point.input_tokens, point.output_tokens))
            number += 1
        step = scheduler.step()
        now += step.duration_s
        for name in step.tokens:
            first.setdefault(name, now)
        for place, name in enumerate(step.finished):
            if now + path_s / 2 <= seconds:
                itl_s = (now - first[name]) / max(point.output_tokens - 1, 1)
                found.append(Latency(first[name] - began[name] + path_s, itl_s))
            del began[name]
            heappush(coming, (now + path_s + APART_S * place, number))
    return found
