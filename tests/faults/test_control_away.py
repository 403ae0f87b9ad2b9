"""Row C: gateways serve while the controller is killed; after a restart it finds the same fleet.

Ray's own controllers are killed in ``tests/e2e/test_lifecycle.py``, which starts Ray.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from tests.faults.alerts import raises
from tests.faults.live import MODEL, Live
from tests.gateway.worker import until

pytestmark = pytest.mark.process


def processes(fleet: dict[str, dict[str, object]]) -> dict[str, tuple[object, object]]:
    return {name: (replica["pid"], replica["incarnation"]) for name, replica in fleet.items()}


async def test_c_gateways_serve_while_the_controller_is_killed(tmp_path: Path) -> None:
    async with Live(tmp_path).running(2) as live:
        before, worker = await live.settle(2), live.workers[0]
        with_it = await live.scrape()
        epoch = (await live.call_controller("GET", "/fleet"))["epoch"]
        async with live.expect(MODEL, {"ok": 34}, attempts=34):
            streams = await live.streams(MODEL, 4, max_tokens=300, ignore_eos=True)
            await live.end_controller(signal.SIGKILL)
            away = await asyncio.gather(*(live.ask(MODEL, max_tokens=2) for _ in range(10)))
            assert {reply.status for reply in away} == {200}
            assert {reply.headers["x-tidegate-replica"] for reply in away} <= set(before)
            without = await live.scrape()
            raises(tmp_path, "TidegateControllerMissing", with_it, without, instance="g")
            # A worker that starts now does not need the controller.
            worker.send_signal(signal.SIGTERM)
            for stream in streams:
                assert (await stream.end()).error is None
            assert await worker.wait() == 0
            await live.reconnect_admin()
            await live.start_worker()
            await until(lambda: live.admits(set(before)), "the last fleet")
            assert (await live.admin.get("/admin/fleet")).json()["source"] == "disk"
            for _ in range(10):
                assert (await live.ask(MODEL, max_tokens=2)).status == 200
            await live.start_controller()
            after = await live.settle(2)
            assert processes(after) == processes(before)
            assert (await live.call_controller("GET", "/fleet"))["epoch"] > epoch
            for _ in range(10):
                assert (await live.ask(MODEL, max_tokens=2)).status == 200

            async def followed() -> bool:
                return (await live.admin.get("/admin/fleet")).json()["source"] == "controller"

            await until(followed, "the new controller is followed")
