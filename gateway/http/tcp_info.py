"""The kernel's statistics of a TCP connection (Linux ``tcp_info``)."""

from __future__ import annotations

import asyncio
import socket
import struct

# Where Linux's tcp_info counts the bytes that the other side has acknowledged, and has the smallest round
# trip of some minutes, in microseconds: unlike the mean it has no delayed acknowledgements in it.
_TCP_INFO_BYTES, _BYTES_ACKED_AT, _BYTES_ACKED = 152, 120, struct.Struct("Q")
_ROUND_TRIP_AT, _ROUND_TRIP = 148, struct.Struct("I")
# Where it has the state, of which these are known to the kernel before anything is read: the other side was
# reset, or sends no more.
_STATE_AT, _STATE = 0, struct.Struct("B")
_ESTABLISHED, _CLOSED, _CLOSE_WAIT = 1, 7, 8
# What Linux has for a round trip before the first measurement.
_NO_ROUND_TRIP = 0xFFFFFFFF


def acknowledged(transport: asyncio.Transport | None) -> int:
    """How many of the bytes sent the server has acknowledged; -1 where TCP does not tell."""
    return _read(transport, _BYTES_ACKED, _BYTES_ACKED_AT, 0) - 1  # without the SYN


def round_trip_s(transport: asyncio.Transport | None) -> float:
    """The smallest round trip to the server in some minutes; 0 where TCP does not tell."""
    measured = _read(transport, _ROUND_TRIP, _ROUND_TRIP_AT, _NO_ROUND_TRIP)
    return 0.0 if measured == _NO_ROUND_TRIP else measured / 1e6


def has_left(transport: asyncio.Transport | None) -> bool:
    """Whether the other side sends no more, also where it is not read; false where TCP does not tell."""
    return _read(transport, _STATE, _STATE_AT, _ESTABLISHED) in (_CLOSED, _CLOSE_WAIT)


def _read(transport: asyncio.Transport | None, kind: struct.Struct, at: int, unknown: int) -> int:
    """A number in the kernel's ``tcp_info``; ``unknown`` where there is none."""
    sock = transport.get_extra_info("socket") if transport is not None else None
    if sock is None:
        return unknown
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        return int(kind.unpack_from(info, at)[0])
    except (AttributeError, OSError, struct.error):  # not Linux, or an older one
        return unknown
