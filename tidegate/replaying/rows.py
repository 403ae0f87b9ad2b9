"""What a replay records of each request: a line of JSON, which `tidegate calibrate --check` reads."""

from __future__ import annotations

import msgspec


class ReplayRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request as it went.

    ``at`` is when it was sent, in seconds since the replay began: ``late_s`` after its instant in the trace.
    ``input_tokens``, ``cached_tokens`` of them and ``output_tokens`` are as the endpoint counted them,
    or what was asked for where it did not. Latencies are in seconds from when it was sent: ``ttft_s`` to the
    first event, ``itl_s`` from there to the last token by the tokens after the first, ``e2e_s`` to the last
    byte; ``None`` where there was no such event. ``status`` is that of HTTP, 0 without an answer; ``error``
    is empty if the answer was whole.
    """

    at: float
    late_s: float
    input_tokens: int
    output_tokens: int
    status: int
    ttft_s: float | None = None
    itl_s: float | None = None
    e2e_s: float | None = None
    error: str = ""
    cached_tokens: int = 0
    model: str = ""
    adapter: str = ""
    blocks: tuple[int, ...] = ()

    @property
    def served(self) -> bool:
        """Whether the answer was whole."""
        return self.status == 200 and not self.error
