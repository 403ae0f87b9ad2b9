"""The headers that tell a client what is left of its limits, as OpenAI sends them."""

from __future__ import annotations

from policy.tenancy.token_bucket import PERIOD_S

Headers = list[tuple[bytes, bytes]]


def rate_limit_headers(kind: bytes, limit: float, level: float) -> Headers:
    """Limit, remaining and reset of ``kind`` (requests or tokens); the reset is when all of it is back."""
    reset_s = max(0.0, limit - level) / limit * PERIOD_S
    return [
        (b"x-ratelimit-limit-" + kind, b"%d" % limit),
        (b"x-ratelimit-remaining-" + kind, b"%d" % max(0, int(level))),
        (b"x-ratelimit-reset-" + kind, duration(reset_s).encode()),
    ]


def duration(seconds: float) -> str:
    """``120ms``, ``7.66s``, ``6m0s``, ``25h3m0s``: at least as long, to the millisecond below a minute."""
    whole = int(seconds * 1000 + 0.999)
    if whole < 1000:
        return f"{whole}ms"
    if whole < 60_000:
        return f"{whole / 1000:g}s"
    minutes, rest = divmod(-(-whole // 1000), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s"
