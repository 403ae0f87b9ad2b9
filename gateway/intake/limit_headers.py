"""The headers that tell a client what is left of its limits, as OpenAI sends them."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from policy.tenancy.token_bucket import PERIOD_S

Headers = list[tuple[bytes, bytes]]


class HeaderNames:
    """The names of the headers of one kind of limit."""

    __slots__ = ("limit", "remaining", "reset")

    def __init__(self, limit: bytes, remaining: bytes, reset: bytes) -> None:
        self.limit = limit
        self.remaining = remaining
        self.reset = reset


REQUESTS_HEADERS: Final = HeaderNames(
    b"x-ratelimit-limit-requests", b"x-ratelimit-remaining-requests", b"x-ratelimit-reset-requests"
)
TOKENS_HEADERS: Final = HeaderNames(
    b"x-ratelimit-limit-tokens", b"x-ratelimit-remaining-tokens", b"x-ratelimit-reset-tokens"
)


def rate_limit_headers(names: HeaderNames, limit: float, level: float) -> Headers:
    """Limit, remaining and reset of one kind; the reset is when all of it is back."""
    reset_s = (limit - level) / limit * PERIOD_S
    return [
        _limit_header(names.limit, int(limit)),
        (names.remaining, str(int(level)).encode() if level > 0.0 else b"0"),
        (names.reset, duration(reset_s).encode()),
    ]


@lru_cache(maxsize=1024)
def _limit_header(name: bytes, limit: int) -> tuple[bytes, bytes]:
    return name, str(limit).encode()


def duration(seconds: float) -> str:
    """``120ms``, ``7.66s``, ``6m0s``, ``25h3m0s``: at least as long, to the millisecond below a minute."""
    whole = int(max(0.0, seconds) * 1000 + 0.999)
    if whole < 1000:
        return f"{whole}ms"
    if whole < 60_000:
        return f"{whole / 1000:g}s"
    minutes, rest = divmod(-(-whole // 1000), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s"
