"""A real engine process with adapters: loaded before it is ready and on demand, evicted, counted."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from policy.types import ReplicaPhase
from policy.wire.adapter_catalog import served_name
from policy.wire.headers import SECRET_HEADER
from policy.wire.heartbeat import AdapterRef, AdapterUse, HeartbeatResponse
from serve.host.replica_host import ReplicaHost
from store.state_dir import StateDir
from tests.serve.engine.blobs import stored
from tests.serve.hosts import WITHIN_S, host_spec
from tests.serve.sim_documents import deployment, sim_model

pytestmark = pytest.mark.process


class Process:
    """One engine behind its host, and the adapters of its head."""

    def __init__(self, folder: Path, slots: int, **sim: Any) -> None:
        model = deployment(
            sim_model(
                adapters={"slots_per_replica": slots},
                sim={"profile": "sim-small", "adapter_load_s": 0.0, **sim},
            )
        ).models[0]
        self.blobs = StateDir(folder).adapters
        self.host = ReplicaHost(
            host_spec(model, folder),
            replica="r",
            address="127.0.0.1",
            node="local",
            core_claims=folder / "cores.json",
        )

    def adapter(self, name: str) -> AdapterRef:
        return AdapterRef(name=name, digest=stored(self.blobs, name))

    async def ask(self, wanted: AdapterRef, **body: Any) -> httpx.Response:
        headers = {SECRET_HEADER: "s", "x-tidegate-adapter": f"{wanted.name}@{wanted.digest}"}
        url = f"{self.host.snapshot().url}/v1/completions"
        sent = {"model": served(wanted), "prompt": "The tide", "max_tokens": 8, **body}
        async with httpx.AsyncClient(headers=headers, timeout=WITHIN_S, trust_env=False) as client:
            return await client.post(url, json=sent)

    async def loaded(self, *adapters: AdapterRef) -> None:
        names = {served(adapter) for adapter in adapters}
        async with asyncio.timeout(WITHIN_S):
            while set(self.host.snapshot().adapters) != names:  # noqa: ASYNC110 - loads have no event
                await asyncio.sleep(0.02)


def served(wanted: AdapterRef) -> str:
    return served_name(wanted.name, wanted.digest)


@asynccontextmanager
async def process(
    folder: Path, monkeypatch: pytest.MonkeyPatch, slots: int, hold: str = "", **sim: Any
) -> AsyncIterator[tuple[Process, list[AdapterRef]]]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    made = Process(folder, slots, **sim)
    held = [made.adapter(name) for name in hold]
    made.host.obey(HeartbeatResponse(hold=tuple(held)))
    try:
        await made.host.start()
        yield made, held
    finally:
        await made.host.stop()


async def test_planned_adapters_are_loaded_before_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with process(tmp_path, monkeypatch, 2, "ab") as (there, (a, b)):
        assert there.host.snapshot().state is ReplicaPhase.READY
        assert there.host.snapshot().adapters == (served(a), served(b))
        c = there.adapter("c")
        answers = await asyncio.gather(*(there.ask(c) for _ in range(40)))
        assert {answer.status_code for answer in answers} == {200}
        assert {answer.json()["model"] for answer in answers} == {served(c)}
        assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
        await there.loaded(a, c)
        # The plan changes while it runs.
        there.host.obey(HeartbeatResponse(hold=(c, b)))
        there.host.obey(HeartbeatResponse(hold=None))
        assert (await there.ask(a)).status_code == 200
        there.host.obey(HeartbeatResponse(hold=(b,)))
        uses: list[AdapterUse] = []
        async with asyncio.timeout(WITHIN_S):
            while sum(use.requests for use in uses) < 41:
                await asyncio.sleep(0.02)
                uses += there.host.take_heartbeat().uses
        assert [sum(use.requests for use in uses if use.name == name) for name in "abc"] == [1, 0, 40]
        assert sum(use.loads for use in uses if use.name == "c") == 1
        assert sum(use.busy_s for use in uses if use.name == "c") > 0


async def test_a_failed_adapter_blocks_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with process(tmp_path, monkeypatch, 2) as (there, _):
        good, bad = there.adapter("a"), AdapterRef(name="b", digest="0" * 64)
        there.host.obey(HeartbeatResponse(hold=(bad, good)))
        await there.loaded(good)
        refused = await there.ask(bad)
        assert (refused.status_code, refused.headers["x-tidegate-refusal"]) == (503, "adapter_failed")
        assert "files_missing" in refused.json()["error"]["message"]
        client = httpx.AsyncClient(headers={SECRET_HEADER: "s"}, timeout=WITHIN_S, trust_env=False)
        url = f"{there.host.snapshot().url}/internal/load"
        async with client, client.stream("GET", url) as lines:
            line = await anext(lines.aiter_lines())
        assert f'"refused":["{served(bad)}"]' in line
        # Without the header no adapter is loaded.
        assert (await there.ask(good)).status_code == 200


async def test_a_restarted_engine_loads_its_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with process(tmp_path, monkeypatch, 2, "a") as (there, (a,)):
        b = there.adapter("b")
        there.host.obey(HeartbeatResponse(hold=(b, a)))
        await there.loaded(a, b)
        os.kill(there.host.snapshot().pid, signal.SIGKILL)
        async with asyncio.timeout(WITHIN_S):
            while not (there.host.snapshot().incarnation and there.host.snapshot().url):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await there.loaded(a, b)
        assert there.host.snapshot().adapters == (served(b), served(a))
