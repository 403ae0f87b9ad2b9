"""The request as admission, batching and routing see it."""

from __future__ import annotations

from typing import Final

from policy.types import Priority

# The assumed lengths of a request: a question with context, and a short answer. They weigh as much as
# ASSUMED_REQUESTS counted ones, so that a first probe of one token is not taken for the load.
ASSUMED_INPUT_TOKENS: Final = 512.0
ASSUMED_OUTPUT_TOKENS: Final = 128.0
ASSUMED_REQUESTS: Final = 16
# The weight of the latest answer in the mean: about the last hundred count.
ANSWER_GAIN: Final = 0.02
# A long answer is the expectile of this share: its estimate rises so much faster than it falls.
LONG_SHARE: Final = 0.98
LONG_GAIN: Final = 0.2


class AnswerLength:
    """The decaying mean of tokens per answer of a model, and the tokens of a long one.

    Clients with different uses allow different lengths, so long answers are learned for each power of two of
    the limit.
    """

    def __init__(self) -> None:
        self._count = 0
        self.mean = ASSUMED_OUTPUT_TOKENS
        # By the number of bits of the limit.
        self._long = {0: ASSUMED_OUTPUT_TOKENS}

    def long(self, limit: int = 0) -> int:
        """The tokens of a long answer to a request with this limit (0: none); the limit if no such ended."""
        found = self._long.get(limit.bit_length())
        return limit if found is None else min(limit or int(found), int(found))

    def learn(self, tokens: int, limit: int = 0) -> float:
        """Count an answer, of unknown length if ``tokens`` is 0; returns its weight in the mean."""
        self._count += 1
        gain = max(ANSWER_GAIN, 1.0 / self._count)
        if tokens > 0:
            self.mean += gain * (tokens - self.mean)
            bits = limit.bit_length()
            long = self._long.get(bits, float(tokens))
            longer = tokens - long
            self._long[bits] = long + LONG_GAIN * (LONG_SHARE if longer > 0 else 1 - LONG_SHARE) * longer
        return gain


class Request:
    """One request on its way to a replica.

    ``prompt_tokens`` and ``output_tokens`` are estimates. ``limit_tokens`` is the most that the client allows
    for the answer (0: unknown), ``long_tokens`` those of a long answer within it. ``prefix`` are chained
    hashes of the prompt at growing depths (even numbers that include tenant and adapter), ``depths`` the
    estimated prompt tokens of each; both are empty if there is nothing to share. ``adapter_key`` is an odd
    hash of the adapter, 0 without one; ``session`` a hash of the tenant and its session or conversation, 0
    without one. ``size`` is its memory in bytes, ``prompt_bytes`` that of the text that the engine reads (0:
    it shows no density of tokens). ``arrived`` and ``deadline`` are seconds of one monotonic clock.

    ``ticket`` is its place in the order of arrival, kept when a replica returns it. ``avoid`` names replicas
    that failed it: they are used only if there is no other. ``only`` are those that it may go to (``None``:
    all). ``begun`` counts failures after an attempt began.
    ``passed`` counts the later requests that went to a replica that could have served it while it waits.
    """

    # Written out, because the methods of @dataclass are not compiled.
    __slots__ = (
        "adapter", "adapter_key", "arrived", "avoid", "begun", "deadline", "depths", "limit_tokens",
        "long_tokens", "model", "only", "output_tokens", "passed", "prefix", "priority", "prompt_bytes",
        "prompt_tokens", "session", "size", "tenant", "ticket",
    )  # fmt: skip

    def __init__(  # noqa: PLR0917 - made for each request, in one place
        self,
        model: str,
        tenant: str = "",
        priority: Priority = Priority.STANDARD,
        adapter: str = "",
        adapter_key: int = 0,
        prompt_tokens: int = 0,
        output_tokens: int = 0,
        prefix: tuple[int, ...] = (),
        depths: tuple[int, ...] = (),
        session: int = 0,
        size: int = 0,
        arrived: float = 0.0,
        deadline: float = float("inf"),
        ticket: int = 0,
        avoid: set[str] | None = None,
        begun: int = 0,
        limit_tokens: int = 0,
        long_tokens: int = 0,
        prompt_bytes: int = 0,
    ) -> None:
        self.model = model
        self.tenant = tenant
        self.priority = priority
        self.adapter = adapter
        self.adapter_key = adapter_key
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.prefix = prefix
        self.depths = depths
        self.session = session
        self.size = size
        self.prompt_bytes = prompt_bytes
        self.arrived = arrived
        self.deadline = deadline
        self.ticket = ticket
        self.avoid = set() if avoid is None else avoid
        self.only: frozenset[str] | None = None
        self.begun = begun
        self.limit_tokens = limit_tokens
        self.long_tokens = max(long_tokens, output_tokens)
        self.passed = 0

    @property
    def tokens(self) -> int:
        """The expected tokens: prompt and output."""
        return self.prompt_tokens + self.output_tokens
