"""Load points that identify the coefficients of an engine within a few minutes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from policy.engine.model import EngineModel, Limits, Slo

# At most so many points share the time there is; of so many one is held out.
POINTS = 16
HELD_EVERY = 3
# Of a point's time so much goes into one round of its clients, so that some rounds end in it.
_ROUND = 0.4
_MOST_CLIENTS = 256
# Of few seats each number of clients is a point, of more its doublings.
_FEW = 5
_OUTPUTS = (4, 32)
_SHORTEST = 16
# Of KV cache and context so much may be asked for: prompts come out a little longer than they were meant.
_ROOM = 0.8
SHORTEST_S = 1.0
ANY = Slo()


class Point(NamedTuple):
    """``concurrency`` clients at each replica, each with one request after the other of so many tokens.

    One that is ``held`` out takes no part in the fit.
    """

    concurrency: int
    input_tokens: int
    output_tokens: int
    held: bool = False

    @property
    def description(self) -> str:
        """It in a few words."""
        clients = "1 client" if self.concurrency == 1 else f"{self.concurrency} clients"
        return f"{clients}, {self.input_tokens} tokens in, {self.output_tokens} out"


class PlannedPoints(NamedTuple):
    """Load points in the order in which they are driven, each for a number of seconds."""

    points: list[Point]
    point_s: float


def share_time(plan: Callable[[float], list[Point]], seconds: float, between_s: float) -> PlannedPoints:
    """The points that ``plan`` has for as long as each gets, so that all share ``seconds``.

    The fewer there are the longer each lasts, and the more become possible. ``between_s`` pass after each.
    """
    for count in range(1, POINTS + 1):
        point_s = max(SHORTEST_S, seconds / count - between_s)
        points = plan(point_s)
        if len(points) <= count:
            break
    return PlannedPoints(points, point_s)


def plan_points(
    model: EngineModel, limits: Limits, *, max_model_len: int, bound: int, point_s: float, slo: Slo = ANY
) -> list[Point]:
    """The points for a replica that ``model`` is about right for, :data:`POINTS` at most.

    ``bound`` is how many requests it admits at once, ``point_s`` how many seconds each point has; only one
    client alone may be beyond ``slo``. Prompts of three lengths, from one client that decodes alone to as
    many as there is room and time for. Light and heavy ones take turns, so that what changes while they last
    is in all alike. Of prompts of each length the lightest and the heaviest are never held out: between them
    a model is asked what it was not told.
    """
    longest = max(_SHORTEST, int(_ROOM * max_model_len) - _OUTPUTS[1])
    middle = round((_SHORTEST * longest) ** 0.5)
    found: list[Point] = []
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
    """1, 2, 4 and so on, and the most there may be; all of a few."""
    if most <= _FEW:
        return list(range(1, most + 1))
    return [1 << i for i in range(most.bit_length() - 1)] + [most]


def _within(model: EngineModel, limits: Limits, slo: Slo, clients: int, length: int) -> bool:
    """Whether so many clients are served within ``slo`` though all their prompts come at once."""
    step_s = model.step_time(clients, clients * length, clients)
    return (
        step_s <= slo.itl_s and model.prefill_s(clients * length, limits.max_num_batched_tokens) <= slo.ttft_s
    )


def _point(model: EngineModel, limits: Limits, clients: int, length: int, point_s: float) -> Point | None:
    """The longest answers of which rounds end in time; ``None`` where not even the shortest do, or fit."""
    step_s = model.step_time(clients, clients * length, clients)
    prefill_s = model.prefill_s(clients * length, limits.max_num_batched_tokens)
    outputs = min(int((_ROUND * point_s - prefill_s) / step_s), _OUTPUTS[1])
    if outputs < _OUTPUTS[0] or clients * (length + outputs) > _ROOM * limits.kv_tokens:
        return None
    return Point(clients, length, outputs)


def _thinned(points: list[Point], most: int) -> list[Point]:
    """At most a number of them, evenly spaced, with the first and the last."""
    if len(points) <= most:
        return points
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]
