"""The demand of a plan: a trace or a described load, its busiest minute, and the network that it needs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import msgspec

from policy.config.control import SloConfig
from policy.engine.performance_model import BatchLimits, EngineLoad, EngineModel
from policy.errors import ConfigError
from sim.arrivals import Arrival
from sim.workload.generators.arrivals import RateShape, arrival_times

_MINUTE_S = 60.0
# The gamma shape of the prompts of a described load.
_INPUT_SHAPE = 2.0

# The arrivals of one model at a multiple of the rate; the same at each call.
Arrivals = Callable[[float], Iterable[Arrival]]


class WorkloadDemand(msgspec.Struct, frozen=True, kw_only=True):
    """A load in numbers: ``requests`` over ``lasts_s`` seconds, and their mean tokens.

    The busiest minute starts at ``busiest_s`` with ``peak_rps`` requests per second, and that many tokens of
    prompts and of answers per second.
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
        return self.requests / self.lasts_s

    def workload(self, factor: float = 1.0) -> EngineLoad:
        """The busiest minute at ``factor`` times the load, as input of the engine model."""
        return EngineLoad(
            lam=self.peak_rps * factor, input_tokens=self.input_tokens, output_tokens=self.output_tokens
        )


def describe(load: EngineLoad, cv: float, lasts_s: float, seed: int) -> Iterator[Arrival]:
    """Random requests with gaps of coefficient of variation ``cv``, and lengths that vary.

    Prompts are gamma variables of shape 2, answers exponential, with the means of ``load``: constant lengths
    would be served better than real ones.
    """
    rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
    for at in arrival_times(RateShape(rate=load.lam, cv=cv), rng, lasts_s):
        prompt = rng.gammavariate(_INPUT_SHAPE, load.input_tokens / _INPUT_SHAPE)
        answer = rng.expovariate(1.0 / load.output_tokens)
        yield Arrival(at, max(1, round(prompt)), max(1, round(answer)))


def demand_of(arrivals: Iterable[Arrival], where: str) -> WorkloadDemand:
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
    return WorkloadDemand(
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
    arrivals: Iterable[Arrival], model: EngineModel, limits: BatchLimits, slo: SloConfig, longest: int | None
) -> float:
    """The fraction of ``arrivals`` within ``slo`` if each had a replica for itself: an upper bound.

    A replica takes at most ``longest`` tokens of prompt and answer, and what fits in its KV cache. Gaps are
    those of the first step after the prompt, and shared prompts count as prefix-cache hits.
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


# Measured on the simulated engine's chat stream, which has vLLM's fields, for a model's name of 4 characters.
EVENT_BYTES = 216
STREAM_BYTES = 264
_NAME = 4
# Ethernet with preamble and gap (38), IPv4 (20), TCP with timestamps (32): a token is a packet of its own.
PACKET_BYTES = 90
# HTTP/1.1's chunk around an event: three hexadecimal digits and two line ends.
CHUNK_BYTES = 7
# Assumed: characters of text a token, and headers and JSON around a prompt.
CHARACTERS_PER_TOKEN = 4.0
REQUEST_BYTES = 800
# What a packet carries at an MTU of 1500.
_SEGMENT_BYTES = 1448


class NetworkTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """The traffic of the busiest minute in bytes per second: ``requests`` to replicas, ``streams`` back.

    A gateway has each twice, from clients and to replicas; ``each_way`` is its traffic in one direction.
    ``replica_in`` and ``replica_out`` are of one replica. ``streams_open`` is the peak number of streams,
    each a connection to a client and one to a replica.
    """

    requests: float
    streams: float
    each_way: float
    replica_in: float
    replica_out: float
    streams_open: int
    events_per_s: float


def network(demand: WorkloadDemand, model: str, replicas: int, streams_open: int) -> NetworkTraffic:
    """The traffic of the load, all of it streamed chat, of a model called ``model``."""
    rps = demand.peak_rps
    event = EVENT_BYTES + len(model.encode()) - _NAME + CHUNK_BYTES + PACKET_BYTES
    output_tokens = demand.peak_output_tokens_per_s
    streams = output_tokens * event + rps * STREAM_BYTES
    body = demand.peak_input_tokens_per_s * CHARACTERS_PER_TOKEN + rps * REQUEST_BYTES
    requests = body * (1.0 + PACKET_BYTES / _SEGMENT_BYTES)
    return NetworkTraffic(
        requests=requests,
        streams=streams,
        each_way=requests + streams,
        replica_in=requests / replicas,
        replica_out=streams / replicas,
        streams_open=streams_open,
        events_per_s=output_tokens,
    )
