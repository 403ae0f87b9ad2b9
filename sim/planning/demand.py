"""What is asked for: a trace or a described load, read as often as it is tried, and its busiest minute."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import msgspec

from policy.config.control import SloConfig
from policy.engine.model import EngineModel, Limits, Workload
from policy.errors import ConfigError
from sim.arrival import Arrival
from sim.workload.generators.arrivals import RateShape, arrival_times

_MINUTE_S = 60.0
# Of a described load: the shape of the gamma variable that prompts are drawn from. Answers are exponential.
_INPUT_SHAPE = 2.0

# The arrivals of one model at so many times the rate; the same at each call.
Arrivals = Callable[[float], Iterable[Arrival]]


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """A load in figures: ``requests`` over ``lasts_s`` seconds, and the means of their tokens.

    In its busiest minute, from ``busiest_s`` on, come ``peak_rps`` requests per second, with so many tokens
    of prompts and of answers per second.
    """

    requests: int
    lasts_s: float
    input_tokens: float
    output_tokens: float
    busiest_s: float
    peak_rps: float
    peak_input_tokens_per_s: float
    peak_output_tokens_per_s: float

    @property
    def rps(self) -> float:
        """Requests per second on average."""
        return self.requests / self.lasts_s

    def workload(self, factor: float = 1.0) -> Workload:
        """The busiest minute, at ``factor`` times the load, as the engine model takes it."""
        return Workload(
            lam=self.peak_rps * factor, input_tokens=self.input_tokens, output_tokens=self.output_tokens
        )


def describe(load: Workload, cv: float, lasts_s: float, seed: int) -> Iterator[Arrival]:
    """Requests that come at random, with gaps of that coefficient of variation, and lengths that vary.

    Prompts are gamma variables of shape 2, answers exponential ones, of those means: lengths of one value
    would be served better than any users' are.
    """
    rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
    for at in arrival_times(RateShape(rate=load.lam, cv=cv), rng, lasts_s):
        prompt = rng.gammavariate(_INPUT_SHAPE, load.input_tokens / _INPUT_SHAPE)
        answer = rng.expovariate(1.0 / load.output_tokens)
        yield Arrival(at, max(1, round(prompt)), max(1, round(answer)))


def demand_of(arrivals: Iterable[Arrival], where: str) -> Demand:
    """Read ``arrivals`` once; raises :class:`policy.errors.ConfigError` with ``where`` if there are none."""
    requests = inputs = outputs = 0
    minutes: dict[int, Counter[str]] = {}
    at = 0.0
    for arrival in arrivals:
        at = arrival.at
        requests += 1
        inputs += arrival.input_tokens
        outputs += arrival.output_tokens
        minute = minutes.setdefault(int(at // _MINUTE_S), Counter())
        minute["requests"] += 1
        minute["inputs"] += arrival.input_tokens
        minute["outputs"] += arrival.output_tokens
    if not requests:
        raise ConfigError(where, "no request", "a request at least, for the model that is planned")
    busiest = max(minutes, key=lambda each: (minutes[each]["inputs"] + minutes[each]["outputs"], -each))
    most = minutes[busiest]
    # A load that is over within its first minute was as busy as it was long.
    lasts_s = min(_MINUTE_S, max(at, 1.0)) if len(minutes) == 1 else _MINUTE_S
    return Demand(
        requests=requests,
        lasts_s=max(at, 1.0),
        input_tokens=inputs / requests,
        output_tokens=outputs / requests,
        busiest_s=busiest * _MINUTE_S,
        peak_rps=most["requests"] / lasts_s,
        peak_input_tokens_per_s=most["inputs"] / lasts_s,
        peak_output_tokens_per_s=most["outputs"] / lasts_s,
    )


def met_alone(
    arrivals: Iterable[Arrival], model: EngineModel, limits: Limits, slo: SloConfig, longest: int | None
) -> float:
    """The part of ``arrivals`` within ``slo`` if each had a replica for itself: no count attains more.

    A replica takes ``longest`` tokens of prompt and answer at most, and what fits in its KV cache.

    It is an upper bound: gaps are those of the first step after the prompt, and what may be found in a prefix
    cache is taken to be.
    """
    met = count = 0
    for arrival in arrivals:
        count += 1
        whole = arrival.input_tokens + arrival.output_tokens
        if whole - 1 > limits.kv_tokens or (longest is not None and whole > longest):
            continue
        shared = bool(arrival.blocks or arrival.session)
        prompt = 1 if shared else arrival.input_tokens
        if (
            slo.ttft_p95_s is not None
            and model.prefill_s(prompt, limits.max_num_batched_tokens) > slo.ttft_p95_s
        ):
            continue
        gap_s = model.step_time(1, arrival.input_tokens, 1)
        met += arrival.output_tokens < 2 or slo.itl_p95_s is None or gap_s <= slo.itl_p95_s
    return met / count if count else 1.0
