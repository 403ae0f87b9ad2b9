"""The network that a gateway needs: bytes of requests one way, of streams the other."""

from __future__ import annotations

import msgspec

from sim.planning.demand import Demand

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


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """In the busiest minute, in bytes per second: ``requests`` towards replicas and ``streams`` back.

    A gateway has each twice, from clients and to replicas; ``each_way`` is what its network carries in one
    direction, which is the same in the other. ``replica_in`` and ``replica_out`` are those of one replica.
    ``streams_open`` is how many are open at once, each a connection to a client and one to a replica.
    """

    requests: float
    streams: float
    each_way: float
    replica_in: float
    replica_out: float
    streams_open: int
    events_per_s: float


def network(demand: Demand, model: str, replicas: int, streams_open: int, factor: float = 1.0) -> Network:
    """What ``factor`` times the load takes, all of it streamed chat, of a model called ``model``."""
    rps = demand.peak_rps * factor
    event = EVENT_BYTES + len(model.encode()) - _NAME + CHUNK_BYTES + PACKET_BYTES
    output_tokens = demand.peak_output_tokens_per_s * factor
    streams = output_tokens * event + rps * STREAM_BYTES
    body = demand.peak_input_tokens_per_s * factor * CHARACTERS_PER_TOKEN + rps * REQUEST_BYTES
    requests = body * (1.0 + PACKET_BYTES / _SEGMENT_BYTES)
    return Network(
        requests=requests,
        streams=streams,
        each_way=requests + streams,
        replica_in=requests / replicas,
        replica_out=streams / replicas,
        streams_open=streams_open,
        events_per_s=output_tokens,
    )
