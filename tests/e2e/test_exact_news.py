"""What the router believes to be cached against what the engine finds, with a cache that is too small."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml

from policy.deployment_file.parse import parse
from policy.engine.performance_model import BLOCK
from policy.types import EngineKind, Runner
from serve.engine.interface import EngineSpec
from store.model_weights.prepare import prepare
from tests.e2e.exact_news import MODEL, Agreement, Clients, deployed, restarted
from tests.e2e.stack import ROOT
from tests.gateway.fake_replica import SECRET

# Of the tokens of all prompts.
BOUND = 0.02


def spec(kind: EngineKind, engine_args: dict[str, Any], **more: Any) -> EngineSpec:
    return EngineSpec(
        kind=kind, model=MODEL, runner=Runner.GENERATE, host="127.0.0.1", secret=SECRET, bound=8,
        engine_args=engine_args, **more,
    )  # fmt: skip


def agrees(part: str, found: Agreement, forgotten_tokens: int = 0) -> None:
    """The error is within the bound, but for tokens that were forgotten, each of which may count once."""
    print(f"{part}: {found}")  # noqa: T201 - the measurement
    assert 0.1 < found.cached / found.prompt < 0.95, "the cache is too small for all, and holds some"
    assert found.error < BOUND + forgotten_tokens / found.prompt, f"{part}: {found}"


@pytest.mark.process
@pytest.mark.parametrize("host", [{}, {"kv_offloading_size": 0.05}])
async def test_the_router_believes_what_the_simulated_engine_holds(
    tmp_path: Path, host: dict[str, float]
) -> None:
    blocks = 160
    args = {"num_gpu_blocks_override": blocks, "max_model_len": 2048, **host}
    async with deployed(spec(EngineKind.SIM, args), tmp_path) as (stack, replica):
        clients = Clients(stack, 1, 7, words=(60, 500))
        agrees("at first", await clients.run(120, 4))
        await restarted(stack, replica)
        agrees("after a restart", await clients.run(80, 4))
        assert replica.engine.blocks is not None
        replica.engine.blocks.lost()
        agrees("while it learns again", await clients.run(40, 4), forgotten_tokens=BLOCK * blocks)
        agrees("after a gap", await clients.run(60, 4))


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.timeout(3000)
@pytest.mark.filterwarnings("ignore")
async def test_the_router_believes_what_vllm_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = yaml.safe_load((ROOT / "deployments" / "smollm2-cpu-modes.yaml").read_text())
    model = parse(document).models[0]
    weights = prepare(model.source, token_file=None, progress=lambda _: None).path
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    # Blocks of 128 tokens: 3,072 tokens for beginnings of 9,000.
    args = {**model.engine_args, "num_gpu_blocks_override": 24, "max_model_len": 1536}
    parts = spec(EngineKind.VLLM, args, weights=str(weights), cpus=2)
    async with deployed(parts, tmp_path) as (stack, replica):
        clients = Clients(stack, 1, 12, words=(60, 700))
        agrees("at first", await clients.run(250))
        await restarted(stack, replica)
        agrees("after a restart", await clients.run(150))
        events: Any = replica.engine
        events.events.subscriber.socket.unsubscribe(b"")
        await clients.run(10)
        events.events.subscriber.socket.subscribe(b"")
        await asyncio.sleep(1)
        agrees("after a gap", await clients.run(100))
