"""A gateway beside its own engine, or beside another server of the same model, in interleaved rounds.

``python -m loadtests.bench.baseline_comparison [--baseline URL] [--gateway URL]``. Without ``--baseline`` the
baseline is the only replica of the running deployment, on the engine's own port. Exit code 1 if the gateway
misses a target or a request fails.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from time import perf_counter

import msgspec
import uvloop

from loadtests.bench.median_and_range import MedianAndRange, table
from policy.errors import TidegateError
from policy.types import ReplicaPhase
from policy.wire.headers import SECRET_HEADER
from sim.arrivals import Arrival
from store.state_dir import StateDir, default_root
from tidegate.commands.deployment_context import controller_client
from tidegate.replay.endpoint_api import RequestFormat, models_of, probe, send
from tidegate.replay.http_client import ReplayConnectionPool
from tidegate.replay.prompts import PromptGenerator

BASELINE, GATEWAY = "baseline", "gateway"


class BaselineRound(msgspec.Struct, frozen=True):
    """One endpoint in one round: output tokens per second, TTFT p50 in seconds, failed requests."""

    tokens_per_s: float
    ttft_p50_s: float
    errors: int
    error: str = ""


class BaselineComparison(msgspec.Struct, frozen=True):
    """Both endpoints at one number of streams; ratios, by round, are the gateway's over the baseline's."""

    streams: int
    tokens_per_s: dict[str, MedianAndRange]
    ttft_p50_s: dict[str, MedianAndRange]
    errors: dict[str, int]
    throughput_ratio: MedianAndRange
    ttft_ratio: MedianAndRange

    @classmethod
    def of(cls, streams: int, rounds: Sequence[Mapping[str, BaselineRound]]) -> BaselineComparison:
        """The comparison of ``rounds``, each with both endpoints."""

        def figures(name: str) -> dict[str, MedianAndRange]:
            return {
                side: MedianAndRange.of([getattr(each[side], name) for each in rounds]) for side in rounds[0]
            }

        def ratio(name: str) -> MedianAndRange:
            pairs = [(getattr(each[GATEWAY], name), getattr(each[BASELINE], name)) for each in rounds]
            return MedianAndRange.of([ours / theirs if theirs else 0.0 for ours, theirs in pairs])

        return cls(
            streams,
            figures("tokens_per_s"),
            figures("ttft_p50_s"),
            {side: sum(each[side].errors for each in rounds) for side in rounds[0]},
            ratio("tokens_per_s"),
            ratio("ttft_p50_s"),
        )

    def meets(self, min_throughput_ratio: float, max_ttft_ratio: float) -> bool:
        """Whether the median ratios are within the limits, and the gateway failed no request."""
        fast = (
            self.throughput_ratio.median >= min_throughput_ratio and self.ttft_ratio.median <= max_ttft_ratio
        )
        return fast and not self.errors[GATEWAY]


@dataclass(frozen=True, slots=True)
class BenchmarkEndpoint:
    """An endpoint with the form of its requests, and the prompts in the length that it counts."""

    pool: ReplayConnectionPool
    request_format: RequestFormat
    prompts: PromptGenerator

    @classmethod
    async def of(cls, pool: ReplayConnectionPool, wanted: RequestFormat, seed: int) -> BenchmarkEndpoint:
        """Two short requests find out what the endpoint accepts and how it counts tokens.

        Without a model in ``wanted`` it is the endpoint's first one: a server may have another name for it.
        """
        if not wanted.model:
            wanted = replace(wanted, model=(await models_of(pool))[0])
        request_format, fit = await probe(pool, wanted, seed)
        return cls(pool, request_format, PromptGenerator(seed, fit))

    async def run(self, bodies: Sequence[bytes], streams: int) -> BaselineRound:
        """Send ``bodies`` by ``streams`` clients, each of which sends the next one after an answer."""
        left = iter(bodies)
        tokens, errors = 0, []
        ttfts = []

        async def client() -> None:
            nonlocal tokens
            for body in left:
                _, timings = await send(self.pool, self.request_format.path, body)
                tokens += timings.output_tokens
                if timings.error:
                    errors.append(timings.error)
                elif timings.first_at is not None:
                    ttfts.append(timings.first_at - timings.sent_at)

        began = perf_counter()
        await asyncio.gather(*(client() for _ in range(streams)))
        wall_s = perf_counter() - began
        p50_s = statistics.median(ttfts) if ttfts else 0.0
        return BaselineRound(tokens / wall_s, p50_s, len(errors), errors[0] if errors else "")

    def bodies(self, numbers: Iterator[int], requests: int, prompt_tokens: int, tokens: int) -> list[bytes]:
        """Requests whose prompts no other request shares."""
        arrival = Arrival(0.0, prompt_tokens, tokens)
        model = self.request_format.model
        return [
            self.request_format.body(model, self.prompts.text(arrival, next(numbers)), tokens)
            for _ in range(requests)
        ]


def replica_pool(state: StateDir) -> ReplayConnectionPool:
    """The only ready replica of the deployment on ``state``; ``TidegateError`` for another count."""
    client = controller_client(state)
    try:
        ready = [each for each in client.fleet().replicas if each.state is ReplicaPhase.READY]
    finally:
        client.close()
    if len(ready) != 1:
        raise TidegateError(f"{len(ready)} replicas are ready: a comparison needs one")
    return ReplayConnectionPool(ready[0].url, headers={SECRET_HEADER: state.secret()})


async def compare(
    pools: Mapping[str, ReplayConnectionPool], options: argparse.Namespace
) -> list[BaselineComparison]:
    """Measure both endpoints at each number of streams; the first of a round alternates."""
    wanted = RequestFormat(model=options.model, chat=options.chat)
    endpoints = {side: await BenchmarkEndpoint.of(pool, wanted, options.seed) for side, pool in pools.items()}
    numbers = count()
    found = []
    for streams in options.streams:
        rounds: list[dict[str, BaselineRound]] = []
        for number in range(options.rounds):
            measured = {}
            for side in (BASELINE, GATEWAY) if number % 2 == 0 else (GATEWAY, BASELINE):
                endpoint = endpoints[side]
                bodies = endpoint.bodies(
                    numbers, streams * options.requests, options.prompt_tokens, options.tokens
                )
                measured[side] = result = await endpoint.run(bodies, streams)
                if result.error:
                    sys.stderr.write(f"{side}, {streams} streams: {result.errors} failed: {result.error}\n")
            rounds.append(measured)
        found.append(BaselineComparison.of(streams, rounds))
    return found


async def _compared(
    pools: Mapping[str, ReplayConnectionPool], options: argparse.Namespace
) -> list[BaselineComparison]:
    try:
        return await compare(pools, options)
    finally:
        for pool in pools.values():
            pool.close()
        await asyncio.sleep(0)  # the event loop closes their connections in its next turn


def rendered(found: Sequence[BaselineComparison]) -> str:
    """A Markdown table: medians over the rounds, with the lowest and highest."""
    head = ["streams"]
    head += [f"{side} {name}" for name in ("tokens/s", "TTFT p50 ms") for side in (BASELINE, GATEWAY)]
    head += ["throughput ratio", "TTFT ratio", "errors"]
    rows = [
        [
            str(each.streams),
            *(each.tokens_per_s[side].text() for side in (BASELINE, GATEWAY)),
            *(each.ttft_p50_s[side].text(1, 1e3) for side in (BASELINE, GATEWAY)),
            each.throughput_ratio.text(2),
            each.ttft_ratio.text(2),
            f"{each.errors[BASELINE]}, {each.errors[GATEWAY]}",
        ]
        for each in found
    ]
    return table(head, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print; returns 1 when a target is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.bench.baseline_comparison",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gateway", default="http://127.0.0.1:8080", help="URL of the gateway")
    parser.add_argument("--baseline", help="URL of the other server; without it, the replica's own port")
    parser.add_argument("--state-dir", type=Path, help="of the running deployment; see `tidegate --help`")
    parser.add_argument("--api-key", default="", help="for the gateway")
    parser.add_argument("--model", default="", help="the first of each endpoint without it")
    parser.add_argument("--chat", action="store_true", help="chat requests instead of completions")
    parser.add_argument("--streams", default="1,16,32", help="numbers of concurrent streams")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of each request")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--requests", type=int, default=2, help="requests of each stream in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--min-throughput-ratio", type=float, default=0.9, help="target: ratio of tokens/s")
    parser.add_argument("--max-ttft-ratio", type=float, default=1.2, help="target: ratio of TTFT p50")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    options.streams = [int(each) for each in options.streams.split(",")]
    state = StateDir(options.state_dir or default_root())
    try:
        baseline = ReplayConnectionPool(options.baseline) if options.baseline else replica_pool(state)
        pools = {BASELINE: baseline, GATEWAY: ReplayConnectionPool(options.gateway, options.api_key)}
        found = uvloop.run(_compared(pools, options))
    except (TidegateError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n" if options.json else rendered(found))
    return int(not all(each.meets(options.min_throughput_ratio, options.max_ttft_ratio) for each in found))


if __name__ == "__main__":
    sys.exit(main())
