"""The requests of a workload: arrivals in order of time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Arrival(NamedTuple):
    """One request: ``at`` in seconds after the start of the trace, and its tokens.

    ``blocks`` are hashes of the prompt in blocks of :data:`policy.wire.capture.BLOCK_TOKENS` tokens, each of
    which covers all before it too; empty where nothing is shared. ``model`` is empty if there is only one.
    ``session`` identifies a conversation, 0 for none.

    With ``follows`` the load is a closed loop: the request is sent ``think_s`` seconds after a request of
    that session has ended, each end for one follower. ``at`` is then when it would be sent if answers took no
    time.
    """

    at: float
    input_tokens: int
    output_tokens: int
    model: str = ""
    adapter: str = ""
    tenant: str = ""
    session: int = 0
    blocks: tuple[int, ...] = ()
    follows: int = 0
    think_s: float = 0.0


# In the order of ``at``, and read once: a trace may be longer than memory.
Trace = Iterable[Arrival]
