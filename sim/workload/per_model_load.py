"""A survey of a trace: which model each request is for, and the load of each model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from policy.errors import ConfigError
from sim.arrivals import Arrival


class ModelNames:
    """Maps the model names of requests to ``names``, the deployment's models.

    ``others`` are the names seen so far for the only model there is.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self.others: set[str] = set()

    def of(self, arrival: Arrival) -> str:
        """The model of a request: the named one, the first if none is named, the only one whatever is named.

        Raises :class:`policy.errors.ConfigError` for an unknown name where there are several models.
        """
        name = arrival.model
        if name in self._names:
            return name
        if name:
            if len(self._names) > 1:
                expected = f"one of: {', '.join(self._names)} (a workload can rename: mix[].model)"
                raise ConfigError("the trace's model", name, expected)
            self.others.add(name)
        return self._names[0]

    def description(self) -> str:
        """A note about requests that named the only model otherwise; empty if none did."""
        if not self.others:
            return ""
        return f"{self._names[0]}: takes the requests for {', '.join(sorted(self.others))}, as the only model"


@dataclass(slots=True)
class ModelLoad:
    """The requests of one model, by second and in sum.

    ``adapted`` requests use an adapter, ``too_long`` exceed what any replica takes. ``related`` says that
    some share blocks or sessions.
    """

    seconds: Counter[int] = field(default_factory=Counter)
    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    related: bool = False
    adapted: int = 0
    too_long: int = 0


@dataclass(frozen=True, slots=True)
class TraceLoad:
    """The load of each model of a trace whose last request arrives at ``ends_at`` seconds."""

    ends_at: float
    loads: dict[str, ModelLoad]


def trace_load(
    arrivals: Iterable[Arrival], addressing: ModelNames, longest: Mapping[str, int] | None = None
) -> TraceLoad:
    """Read ``arrivals`` once; raises what ``addressing`` does.

    ``longest`` is the limit of prompt and answer tokens by model, where it is known.
    """
    most = longest or {}
    loads: dict[str, ModelLoad] = {}
    ends_at = 0.0
    for arrival in arrivals:
        ends_at = arrival.at
        model = addressing.of(arrival)
        load = loads.setdefault(model, ModelLoad())
        load.seconds[int(arrival.at)] += 1
        load.requests += 1
        load.input_tokens += arrival.input_tokens
        load.output_tokens += arrival.output_tokens
        load.adapted += bool(arrival.adapter)
        load.too_long += arrival.input_tokens + arrival.output_tokens > most.get(model, math.inf)
        load.related = load.related or bool(arrival.blocks or arrival.session)
    return TraceLoad(ends_at, loads)
