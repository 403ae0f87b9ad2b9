"""Sessions of agents over HTTP, on simulated engines whose caches hold half of them.

Tidegate's gateway is compared with other routers, which send to the engines themselves.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import cache
from typing import NamedTuple

import httpx
import pytest

from policy.hashing import hash_name
from policy.request import Request
from policy.routing.cost import Candidate
from policy.routing.settings import RoutingSettings
from policy.stats.quantiles import nearest_rank
from policy.wire.capture import BLOCK_TOKENS
from policy.wire.headers import SECRET_HEADER
from sim.arrivals import Arrival
from sim.benchmarks.agents.benchmark import least_computed
from sim.benchmarks.agents.contenders import (
    BaselineRouter,
    CacheAwareRouter,
    RoundRobinRouter,
    SessionHashRouter,
    WeightedScoresRouter,
)
from sim.simulator.closed_loop import ClosedLoop
from sim.workload.generators.agents import Agents
from sim.workload.generators.arrivals import RateShape
from sim.workload.generators.generate import GeneratedWorkload, generate
from sim.workload.generators.request_distributions import LengthDistribution
from tests.e2e.stack import Stack, running

REPLICAS = 3
# Some 40,000 tokens of sessions are open at a time.
KV_TOKENS = 8192
AGENTS = Agents(
    kinds=2, system_tokens=1024, turns=8, turns_p99=16, tool_s=0.05, tool_p99_s=0.5, human_share=0.1,
    human_s=0.5, human_p99_s=2.0, subagent_share=0.05, subagent_turns=2, subagent_turns_p99=4,
    subagent_system_tokens=512, max_tokens=7000, compacted_tokens=600,
)  # fmt: skip
WORKLOAD = GeneratedWorkload(
    arrivals=RateShape(rate=4.0),
    input_tokens=LengthDistribution(p50=200, p99=1200, max=2000),
    output_tokens=LengthDistribution(p50=10, p99=60, max=100),
    agents=AGENTS,
)
DOCUMENT = {
    "models": [{
        "name": "m", "engine": "sim", "sim": {"profile": "sim-small", "speed": 2.0},
        "engine_args": {"max_model_len": KV_TOKENS, "num_gpu_blocks_override": KV_TOKENS // 16},
        "shapes": {"s": {"cpus": 1}},
        "modes": {"s": {"shape": "s", "replicas": REPLICAS}},
        "control": {"policy": "static"},
    }],
    "budget": {"gpus": 0},
    "gateway": {"workers": 1},
}  # fmt: skip
QUICK: tuple[type[BaselineRouter], ...] = (WeightedScoresRouter,)
ALL = (*QUICK, RoundRobinRouter, SessionHashRouter, CacheAwareRouter)


class Answer(NamedTuple):
    """The prompt tokens that the engine computed, and the TTFT in seconds."""

    computed: int
    ttft_s: float


Send = Callable[[Arrival], Awaitable[Answer]]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running(DOCUMENT, "--no-ray") as found:
        found.steady("m", REPLICAS)
        yield found


@cache
def token_ids(seed: str, count: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(100, 999), k=count))  # noqa: S311 - reproducible


def body(arrival: Arrival, run: str) -> dict[str, object]:
    """The request: a block is always the same tokens within a run, so prompts share what they should."""
    tokens: list[int] = []
    for block in arrival.blocks:
        tokens += token_ids(f"{run} {block}", BLOCK_TOKENS)
    tail = f"{run} {arrival.session} {arrival.input_tokens}"
    tokens += token_ids(tail, arrival.input_tokens - len(tokens))
    return {
        "model": "m", "prompt": tokens, "max_tokens": arrival.output_tokens, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


async def ask(client: httpx.AsyncClient, url: str, arrival: Arrival, run: str) -> Answer:
    begun, ttft_s, usage = time.perf_counter(), 0.0, {}
    headers = {"x-session-id": f"{run} {arrival.session}"}
    async with client.stream("POST", f"{url}/completions", json=body(arrival, run), headers=headers) as got:
        assert got.status_code == 200, await got.aread()
        async for line in got.aiter_lines():
            if line.startswith("data: {"):
                ttft_s = ttft_s or time.perf_counter() - begun
                usage = json.loads(line[6:]).get("usage") or usage
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Answer(usage["prompt_tokens"] - cached, ttft_s)


async def play(trace: list[Arrival], send: Send) -> list[Answer]:
    """Send the sessions in a closed loop."""
    loop, begun = ClosedLoop(iter(trace)), time.perf_counter()
    answers: list[Answer] = []

    async def one(arrival: Arrival) -> None:
        answers.append(await send(arrival))
        loop.ended(arrival.session, time.perf_counter() - begun)

    async with asyncio.TaskGroup() as tasks:
        while len(answers) < len(trace):
            while loop.next_at(now := time.perf_counter() - begun) <= now:
                tasks.create_task(one(loop.pop()))
            await asyncio.sleep(0.002)
    return answers


class ClientRouter:
    """Sends to the engines by the rule of a contender, without a gateway."""

    def __init__(
        self, contender: type[BaselineRouter], stack: Stack, client: httpx.AsyncClient, run: str
    ) -> None:
        self._router = contender(RoutingSettings())
        self._draws = random.Random(1)  # noqa: S311 - reproducible
        self._urls = {each.id: each.url for each in stack.replicas("m")}
        self._candidates = [Candidate(name, hash_name(name)) for name in self._urls]
        self._client = client
        self._run = run

    async def send(self, arrival: Arrival) -> Answer:
        depths = tuple(BLOCK_TOKENS * (i + 1) for i in range(len(arrival.blocks)))
        request = Request(
            "m", prompt_tokens=arrival.input_tokens, prefix=arrival.blocks, depths=depths,
            session=arrival.session,
        )  # fmt: skip
        chosen = self._router.choose(request, self._candidates, 0.0, self._draws.random()).chosen
        assert chosen is not None
        candidate = chosen.candidate
        self._router.began(request, candidate, 0.0)
        candidate.in_flight += 1
        try:
            return await ask(self._client, f"{self._urls[candidate.id]}/v1", arrival, self._run)
        finally:
            candidate.in_flight -= 1


@pytest.mark.parametrize(
    ("seconds", "contenders"),
    [
        pytest.param(3.0, QUICK, marks=pytest.mark.process, id="quick"),
        pytest.param(20.0, ALL, marks=pytest.mark.long, id="all"),
    ],
)
async def test_the_gateway_computes_the_fewest_tokens_twice(
    stack: Stack, seconds: float, contenders: tuple[type[BaselineRouter], ...]
) -> None:
    trace = list(generate(WORKLOAD, "contract", seconds, lambda path: ()))
    least = sum(least_computed(trace))
    twice: dict[str, float] = {}
    async with httpx.AsyncClient(
        timeout=60, trust_env=False, headers={SECRET_HEADER: stack.state.secret()}
    ) as client:
        runs: dict[str, Send] = {"tidegate": lambda each: ask(client, stack.base_url, each, f"{seconds}")}
        for contender in contenders:
            name = contender.__name__
            runs[name] = ClientRouter(contender, stack, client, f"{seconds} {name}").send
        for name, send in runs.items():
            answers = await play(trace, send)
            twice[name] = sum(answer.computed for answer in answers) / least - 1.0
            ttft_p95_s = nearest_rank([answer.ttft_s for answer in answers], 0.95)
            # Shown with -rP.
            sys.stdout.write(f"{name}: TTFT p95 {ttft_p95_s:.3f} s, {twice[name]:.1%} computed twice\n")
    ours = twice.pop("tidegate")
    assert all(ours <= other for other in twice.values()), f"{ours} beside {twice}"
