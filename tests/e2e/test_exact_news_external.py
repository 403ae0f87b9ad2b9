"""What the router believes of a vLLM server that Tidegate did not start, against what the server finds."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from policy.deployment_file.parse import parse
from store.model_weights.prepare import prepare
from tests.e2e.exact_news import KEY, MODEL, Clients
from tests.e2e.stack import ROOT
from tests.e2e.test_exact_news import agrees
from tests.gateway.worker import Stack
from tests.ports import free_ports

# Batches that the server can repeat: a gateway that starts later does not learn of all that came before.
BUFFER_STEPS = 20
# What 24 blocks of 128 tokens hold has to be learned then.
LEARNED = 24 * 128


class VllmServer:
    """`vllm serve` with its events on loopback, on one core, started again with the same ports."""

    def __init__(self, weights: Path, arguments: dict[str, Any]) -> None:
        self.port, self.events, self.replay = free_ports(3)
        self._command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(weights), "--served-model-name", MODEL,
            "--host", "127.0.0.1", "--port", str(self.port),
            "--enable-prompt-tokens-details",
            "--kv-events-config", json.dumps(
                {
                    "enable_kv_cache_events": True, "publisher": "zmq",
                    "endpoint": f"tcp://*:{self.events}", "replay_endpoint": f"tcp://*:{self.replay}",
                    "buffer_steps": BUFFER_STEPS,
                }
            ),
        ]  # fmt: skip
        for name, value in arguments.items():
            flag = f"--{name.replace('_', '-')}"
            self._command += [flag] if value is True else [flag, str(value)]

    async def start(self, log: Path) -> None:
        with log.open("ab") as out:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdout=out, stderr=out, env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
            )
        async with httpx.AsyncClient(trust_env=False) as client:
            while True:
                assert self._process.returncode is None, f"see {log}"
                try:
                    if (await client.get(f"http://127.0.0.1:{self.port}/health")).status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                await asyncio.sleep(1)

    async def stop(self) -> None:
        if self._process.returncode is None:
            self._process.terminate()
        await self._process.wait()


@asynccontextmanager
async def gateway(server: VllmServer, root: Path) -> AsyncIterator[Stack]:
    """Two workers in front of it, which follow its events."""
    stack = Stack(root)
    stack.tenants = [
        {"name": "test", "keys_sha256": [hashlib.sha256(KEY.encode()).hexdigest()], "admin": True}
    ]
    at = {"url": f"http://127.0.0.1:{server.port}", "kv_events_port": server.events}
    stack.models = [
        {"name": MODEL, "engine": "external", "urls": [{**at, "kv_events_replay_port": server.replay}]}
    ]
    try:
        for number in range(2):
            await stack.start_worker(number)
        await followed(stack)
        yield stack
    finally:
        await stack.close()


async def followed(stack: Stack) -> None:
    """Both workers follow the events: each answer may be of either."""
    good = 0
    while good < 20:
        [server] = (await stack.admin.get("/admin/fleet")).json()["replicas"] or [{}]
        good = good + 1 if server.get("admissible") and server.get("kv_events") == "exact" else 0
        await asyncio.sleep(0.1)


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.timeout(3000)
async def test_the_router_believes_what_a_server_of_others_holds(tmp_path: Path) -> None:
    document = yaml.safe_load((ROOT / "deployments" / "smollm2-cpu-modes.yaml").read_text())
    model = parse(document).models[0]
    weights = prepare(model.source, token_file=None, progress=lambda _: None).path
    # 3,072 tokens for beginnings of 9,000.
    args = {**model.engine_args, "num_gpu_blocks_override": 24, "max_model_len": 1536}
    server = VllmServer(weights, args)
    await server.start(tmp_path / "vllm.log")
    try:
        async with gateway(server, tmp_path / "first") as stack:
            clients = Clients(stack, 1, 12, words=(60, 700))
            agrees("at first", await clients.run(200))
            await server.stop()
            await server.start(tmp_path / "vllm.log")
            await asyncio.sleep(5)
            await followed(stack)
            agrees("after a restart", await clients.run(200))
        async with gateway(server, tmp_path / "second") as stack:
            clients = Clients(stack, 1, 12, words=(60, 700))
            agrees("of a gateway that came late", await clients.run(40), forgotten_tokens=LEARNED)
            agrees("later", await clients.run(100))
    finally:
        await server.stop()
