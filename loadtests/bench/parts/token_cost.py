"""Processor time of a streamed token on the ways to one engine, its speed and its delays."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from time import perf_counter

import msgspec

from loadtests.bench.benchmark_size import BenchmarkSize, log
from loadtests.bench.median_and_range import MedianAndRange, medians_and_ranges
from loadtests.bench.parts.token_servers import ENGINE, FRONT, GATEWAY, MODEL, OTHER, ServingPath
from loadtests.bench.workload import words
from policy.stats.quantiles import nearest_rank
from tidegate.replay.endpoint_api import CHAT, send

# The row that all are compared with.
BASELINE = "vllm"
TOKENS = 128
# At the least in a cell: with one stream a cell is several answers.
LEAST_REQUESTS = 4
PROMPT_CHARS = 64
# Before each cell: vLLM's engines busy-wait for a second after their last step, on the core of all engines.
SETTLE_S = 1.5


class TokenCost(msgspec.Struct, kw_only=True):
    """One way at one number of streams.

    Microseconds of processor time a token: of the ``gateway`` or router, the ``front`` of the engine, both
    together (``surround_us``), the ``engine`` and ``other`` processes of a deployment. Latencies are seconds;
    ``itl`` is the time between two reads of a stream. ``chunks`` are those of each token: a front that lags
    sends several tokens in one. ``chunk_us`` is ``surround_us`` by chunk. The ratios are to vLLM's own
    server in the same round.
    """

    gateway_us: MedianAndRange
    front_us: MedianAndRange
    surround_us: MedianAndRange
    engine_us: MedianAndRange
    other_us: MedianAndRange
    tokens_per_s: MedianAndRange
    ttft_p50: MedianAndRange
    ttft_p99: MedianAndRange
    itl_p50: MedianAndRange
    itl_p99: MedianAndRange
    chunks: MedianAndRange
    chunk_us: MedianAndRange
    surround_ratio: MedianAndRange
    throughput_ratio: MedianAndRange


class TokenCostSample(msgspec.Struct, frozen=True, kw_only=True):
    """One way at one number of streams in one round: :class:`TokenCost` without the ratios."""

    gateway_us: float
    front_us: float
    surround_us: float
    engine_us: float
    other_us: float
    tokens_per_s: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    chunks: float
    chunk_us: float


async def measure(
    rows: Sequence[ServingPath], streams: Sequence[int], plan: BenchmarkSize
) -> dict[str, dict[str, TokenCost]]:
    """By streams, then by way. Each round has all of them, and begins with another way than the last."""
    numbers = count()
    rounds: defaultdict[int, list[dict[str, TokenCostSample]]] = defaultdict(list)
    for row in rows:
        await run(row, max(streams), 2, numbers)
    for turn in range(plan.rounds):
        first = turn % len(rows)
        for wanted in streams:
            found: dict[str, TokenCostSample] = {}
            for row in (*rows[first:], *rows[:first]):
                await asyncio.sleep(SETTLE_S)
                found[row.name] = cell = await run(row, wanted, TOKENS, numbers)
                used = f"{cell.gateway_us:.0f} + {cell.front_us:.0f}, engine {cell.engine_us:.0f}"
                progress = f"{turn + 1}/{plan.rounds}: {wanted} streams, {row.name}"
                log(f"{progress}: us/token {used}; {cell.tokens_per_s:.0f} tokens/s")
            rounds[wanted].append(found)
    return {str(wanted): costs(found) for wanted, found in rounds.items()}


def costs(rounds: Sequence[Mapping[str, TokenCostSample]]) -> dict[str, TokenCost]:
    """The figures of each way over ``rounds``, at one number of streams."""
    found: dict[str, TokenCost] = {}
    for name in rounds[0]:
        cells = []
        for each in rounds:
            own, base = each[name], each.get(BASELINE, each[name])
            cells.append(
                msgspec.structs.asdict(own)
                | {
                    "surround_ratio": own.surround_us / base.surround_us,
                    "throughput_ratio": own.tokens_per_s / base.tokens_per_s,
                }
            )
        found[name] = TokenCost(**medians_and_ranges(cells))
    return found


def body(number: int, tokens: int) -> bytes:
    """A streamed chat whose answer has exactly ``tokens`` tokens, without the engine's cost of drawing."""
    return msgspec.json.encode(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": words(PROMPT_CHARS, number)}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


async def run(row: ServingPath, streams: int, tokens: int, numbers: Iterator[int]) -> TokenCostSample:
    """``streams`` clients, each of which sends the next chat of ``tokens`` tokens after an answer.

    Prompts are those of ``numbers``, which no other request shares. Raises RuntimeError for any answer that
    is not whole.
    """
    bodies = [body(next(numbers), tokens) for _ in range(max(streams, LEAST_REQUESTS))]
    left = iter(bodies)
    answers = []

    async def client() -> None:
        for each in left:
            _, timings = await send(row.pool, CHAT, each)
            if not timings.error and timings.output_tokens != tokens:
                timings.error = f"{timings.output_tokens} tokens instead of {tokens}"
            if timings.error:
                raise RuntimeError(f"{row.name}, {streams} streams: {timings.error}")
            answers.append(timings)

    before, began = row.cpu_s(), perf_counter()
    await asyncio.gather(*(client() for _ in range(streams)))
    wall_s = perf_counter() - began
    made = tokens * len(bodies)
    us = {name: 1e6 * (used - before[name]) / made for name, used in row.cpu_s().items()}
    ttft = [each.first_at - each.sent_at for each in answers if each.first_at is not None]
    chunks = sum(each.chunks for each in answers)
    gaps = [gap for each in answers for gap in each.gaps]
    return TokenCostSample(
        gateway_us=us[GATEWAY],
        front_us=us[FRONT],
        surround_us=us[GATEWAY] + us[FRONT],
        engine_us=us[ENGINE],
        other_us=us[OTHER],
        tokens_per_s=made / wall_s,
        ttft_p50=nearest_rank(ttft, 0.5),
        ttft_p99=nearest_rank(ttft, 0.99),
        itl_p50=nearest_rank(gaps, 0.5),
        itl_p99=nearest_rank(gaps, 0.99),
        chunks=chunks / made,
        chunk_us=(us[GATEWAY] + us[FRONT]) * made / chunks,
    )
