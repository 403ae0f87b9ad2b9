"""Access to an external server: key, certificate, its name for the model."""

from __future__ import annotations

from typing import NamedTuple


class ServerAccess(NamedTuple):
    """How to send requests to an external server.

    The API ``key``, the ``ca_file`` that verifies its certificate, its name for the ``model`` (empty: ours),
    when the ``ca_file`` was changed, the most requests in flight there (``None``: learned), and the ports of
    its KV events, the second of which repeats them (``None``: it has none).
    """

    key: bytes = b""
    ca_file: str | None = None
    model: str = ""
    ca_changed_ns: int = 0
    max_in_flight: int | None = None
    kv_events_port: int | None = None
    kv_events_replay_port: int | None = None
