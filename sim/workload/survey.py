"""A trace read once: until when requests come, and what each model is asked for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sim.arrival import Arrival
from sim.workload.model_names import ModelNames


@dataclass(slots=True)
class Load:
    """The requests of one model: how many there are in each second, and their tokens in sum.

    ``adapted`` of them are for an adapter, ``too_long`` ask for more tokens than any replica takes.
    ``related`` are some of them to others, by the blocks or the session that they share.
    """

    seconds: Counter[int] = field(default_factory=Counter)
    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    adapted: int = 0
    too_long: int = 0
    related: bool = False


@dataclass(frozen=True, slots=True)
class Survey:
    """The load of each model of a trace whose last request comes at ``ends_at`` seconds."""

    ends_at: float
    loads: dict[str, Load]


def survey(
    arrivals: Iterable[Arrival], addressing: ModelNames, longest: Mapping[str, int] | None = None
) -> Survey:
    """Read ``arrivals``; raises what ``addressing`` does.

    ``longest`` has the most tokens of prompt and answer that replicas of a model take, where that is known.
    """
    most = longest or {}
    loads: dict[str, Load] = {}
    ends_at = 0.0
    for arrival in arrivals:
        ends_at = arrival.at
        model = addressing.of(arrival)
        load = loads.setdefault(model, Load())
        load.seconds[int(arrival.at)] += 1
        load.requests += 1
        load.input_tokens += arrival.input_tokens
        load.output_tokens += arrival.output_tokens
        load.adapted += bool(arrival.adapter)
        load.too_long += arrival.input_tokens + arrival.output_tokens > most.get(model, math.inf)
        load.related = load.related or bool(arrival.blocks or arrival.session)
    return Survey(ends_at, loads)
