"""Rows 43, 46 and 47 and adapter updates, with a real gateway, controller, hosts and guards.

The engines are simulated; ``tests/e2e`` uses vLLM.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from policy.wire.adapter_catalog import served_name
from tests.faults.live import MODEL, Live
from tests.gateway.worker import until
from tests.store.adapters.making import files, write
from tests.store.adapters.test_bad_adapters import BAD

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]
SLOTS, REPLICAS, REQUESTS = 2, 2, 200
# Two heartbeat periods: each host has reported its loaded adapters.
BEATS_S = 1.2


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Live]:
    live = Live(tmp_path_factory.mktemp("adapters"), speed=1.0)
    live.models[0]["adapters"] = {"slots_per_replica": SLOTS, "max_rank": 8}
    live.models[0]["shapes"]["small"]["max_in_flight"] = 256
    live.http.headers["connection"] = "close"
    async with live.running(REPLICAS):
        yield live


def adapter(folder: Path, seed: int) -> str:
    return str(write(folder / f"adapter-{seed}", files(seed)))


async def add(live: Live, name: str, source: str) -> str:
    """Add or replace over the admin port; returns what its requests are served by, once the worker knows."""
    answer = await live.admin.post("/admin/adapters", json={"name": name, "source": source})
    assert answer.status_code == 200, answer.text
    alias = answer.json()["alias"]
    ((number, _),) = alias["split"]
    digest = next(version["digest"] for version in alias["versions"] if version["number"] == number)
    await until(lambda: resolves_to(live, name, digest), "the worker follows")
    return served_name(name, digest)


async def resolves_to(live: Live, name: str, digest: str | None) -> bool:
    answer = await live.http.get(f"/v1/models/{name}")
    return answer.status_code == 404 if digest is None else answer.json().get("root") == digest


async def status(live: Live, name: str) -> Any:
    adapters = (await live.admin.get("/admin/adapters")).json()["adapters"]
    return next(one for one in adapters if one["name"] == name)


async def test_46_each_answer_uses_one_version_while_an_alias_is_replaced(live: Live, tmp_path: Path) -> None:
    versions = [await add(live, "under-load", adapter(tmp_path, 10))]
    seen: Counter[str] = Counter()
    ends = asyncio.Event()

    async def client() -> None:
        while not ends.is_set():
            reply = await live.ask("under-load", stream=True, max_tokens=8)
            assert (reply.status, reply.error) == (200, None)
            named = {json.loads(data)["model"] for data in reply.data if data != "[DONE]"}
            assert len(named) == 1
            seen.update(named)

    async with asyncio.TaskGroup() as clients:
        for _ in range(8):
            clients.create_task(client())
        for seed in (11, 12, 10):
            await until(lambda: seen[versions[-1]] >= 20, "it is asked for")
            versions.append(await add(live, "under-load", adapter(tmp_path, seed)))
            for _ in range(4):
                assert (await live.ask("under-load", max_tokens=2)).json["model"] == versions[-1]
        ends.set()
    assert set(seen) == set(versions)
    assert versions[0] == versions[-1], "the same content is the same version"


async def test_47_two_hundred_requests_for_a_cold_adapter_are_one_load(live: Live, tmp_path: Path) -> None:
    served = await add(live, "cold", adapter(tmp_path, 20))
    async with live.expect(MODEL, {"ok": REQUESTS}):
        replies = await asyncio.gather(*(live.ask("cold", max_tokens=2) for _ in range(REQUESTS)))
        assert Counter(reply.status for reply in replies) == Counter({200: REQUESTS})
        assert {reply.json["model"] for reply in replies} == {served}
    used = {reply.headers["x-tidegate-replica"] for reply in replies}

    async def loads() -> int:
        (version,) = (await status(live, "cold"))["versions"]
        return int(version["loads"])

    async def reported() -> bool:
        return await loads() >= len(used)

    await until(reported, "the hosts have reported")
    await asyncio.sleep(BEATS_S)
    assert await loads() <= REPLICAS


async def test_43_bad_adapters_are_refused_without_interrupting_traffic(live: Live, tmp_path: Path) -> None:
    """Adapters invalid by themselves: a simulated engine has no base shapes to compare with."""
    good = await add(live, "good", adapter(tmp_path, 30))
    before = await live.replicas_ready()
    stream = await live.post("good", stream=True, max_tokens=400, ignore_eos=True)
    await stream.events(1)
    refused = 0
    for number, (name, make, _, _) in enumerate(BAD):
        folder = tmp_path / str(number)
        folder.mkdir()
        answer = await live.admin.post(
            "/admin/adapters", json={"name": f"bad-{number}", "source": str(make(folder))}
        )
        if answer.status_code == 200:
            continue
        assert answer.status_code == 400 and answer.json()["error"]["code"], name
        assert (await live.ask(f"bad-{number}", max_tokens=2)).status == 404, name
        refused += 1
    assert refused >= 50
    assert (await live.ask("good", max_tokens=2)).json["model"] == good
    assert (await stream.end()).error is None
    after = await live.replicas_ready()
    assert {name: replica["incarnation"] for name, replica in after.items()} == {
        name: replica["incarnation"] for name, replica in before.items()
    }


async def test_c_adapters_are_served_while_the_controller_is_killed(live: Live, tmp_path: Path) -> None:
    loaded, other = (
        await add(live, "kept", adapter(tmp_path, 40)),
        await add(live, "never-used", adapter(tmp_path, 41)),
    )
    assert (await live.ask("kept", max_tokens=2)).status == 200
    await live.end_controller(signal.SIGKILL)
    assert (await live.ask("kept", max_tokens=2)).json["model"] == loaded
    away = await live.admin.get("/admin/adapters")
    assert (away.status_code, away.json()["error"]["code"]) == (503, "controller_unreachable")
    await live.start_controller()
    await live.settle(REPLICAS)
    assert (await live.ask("never-used", max_tokens=2)).json["model"] == other

    async def known() -> bool:
        adapters = (await live.admin.get("/admin/adapters")).json().get("adapters", [])
        return {one["name"] for one in adapters} >= {"kept", "never-used"}

    await until(known, "the new controller knows them")
