"""Controllers that elect their leader, gateways that follow it, and requests that may not fail meanwhile."""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from policy.config.deployment import Cluster
from policy.wire.headers import SECRET_HEADER
from serve.actuator.local import LocalActuator
from store.database import Database
from store.election.database_state_dir import DatabaseStateDir
from store.state_dir import StateDir
from tests.gateway.fake_replica import SECRET
from tests.gateway.worker import ROOT, Stack, until
from tests.ports import free_ports
from tests.serve.sim_documents import sim_model

MODEL = "m"


class Elected:
    """A controller on 127.0.0.2 and one on 127.0.0.3, with a gateway beside each; processes of the test."""

    def __init__(self, root: Path, store: str, lease_s: float, *, gateways: int = 2) -> None:
        self.root = root
        self.store = store
        port = free_ports(1)[0]
        self.addresses = [f"127.0.0.{i}:{port}" for i in (2, 3)]
        self.cluster = {"controller": ",".join(self.addresses), "leader_election": {"lease_s": lease_s}}
        self.plane: dict[str, asyncio.subprocess.Process] = {}
        self._running: list[asyncio.Task[None]] = []
        self.gateways = [Stack(self._folder(f"gateway-{i}"), f"127.0.0.{i}") for i in (2, 3)[:gateways]]
        for stack in self.gateways:
            # As it serves, so that a switch takes as long as the requests and the starts.
            stack.models = [sim_model(sim={"profile": "sim-small", "speed": 2.0})]
            stack.store, stack.more = store, {"cluster": self.cluster}
        self.answers: Counter[str] = Counter()
        # One that is paused answers nothing: the others are asked again soon.
        self._client = httpx.AsyncClient(trust_env=False, timeout=1.0, headers={SECRET_HEADER: SECRET})

    def _folder(self, name: str) -> Path:
        path = self.root / name
        path.mkdir()
        return path

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Elected]:
        try:
            for i, address in enumerate(self.addresses):
                folder = self._folder(f"controller-{i}")
                document = {"models": self.gateways[0].models, "cluster": self.cluster, "store": self.store}
                (folder / "deployment.json").write_text(json.dumps(document))
                StateDir(folder).ensure()
                (folder / "secret").write_text(SECRET)
                (folder / "secret").chmod(0o600)
                self._running.append(asyncio.create_task(self._keep_running(address, folder)))
            for stack in self.gateways:
                await stack.start_worker()
            await self.leader()
            for stack in self.gateways:
                await until(lambda stack=stack: self._serves(stack), "the gateway serves")
            yield self
        finally:
            await self._close()

    async def _keep_running(self, address: str, folder: Path) -> None:
        """Start a controller again whenever it has ended, as its supervisor does."""
        command = ("-m", "serve.elected_controller", "--state", str(folder), "--address", address)
        with (folder / "log").open("ab") as log:
            while True:
                self.plane[address] = await asyncio.create_subprocess_exec(
                    sys.executable, *command, cwd=ROOT, stdout=log, stderr=log
                )
                await self.plane[address].wait()

    def signal(self, address: str, how: signal.Signals) -> asyncio.subprocess.Process:
        """Send a signal to a controller; returns its process."""
        process = self.plane[address]
        process.send_signal(how)
        return process

    async def pause(self, address: str) -> asyncio.subprocess.Process:
        """Pause a controller; on SQLite outside of its transactions, which block the others (ADR 19)."""
        while True:
            process = self.signal(address, signal.SIGSTOP)
            if not self.store.startswith("sqlite:///"):
                return process
            with (
                suppress(sqlite3.OperationalError),
                sqlite3.connect(self.store.removeprefix("sqlite:///"), timeout=0.2) as database,
            ):
                database.execute("BEGIN IMMEDIATE")
                return process
            process.send_signal(signal.SIGCONT)
            await asyncio.sleep(0.01)

    async def ask(self, address: str, method: str, path: str, body: object = None) -> Any:
        """The answer of a controller, ``None`` if it does not lead or does not answer."""
        with suppress(httpx.HTTPError):
            answer = await self._client.request(method, f"http://{address}{path}", json=body)
            return answer.json() if answer.status_code == 200 else None
        return None

    async def leader(self, after: int = 0) -> tuple[str, int]:
        """Address and term of the controller that leads, in a term above ``after``; never do two."""
        found: list[tuple[str, int]] = []

        async def led() -> bool:
            states = await asyncio.gather(*(self.ask(each, "GET", "/leader") for each in self.addresses))
            leaders = [(each["address"], each["term"]) for each in states if each and each["leads"]]
            assert len({term for _, term in leaders}) == len(leaders), leaders
            found[:] = [(address, term) for address, term in leaders if term > after]
            return bool(found) and await self.ask(found[-1][0], "GET", "/fleet") is not None

        await until(led, f"a controller leads after term {after}")
        return found[-1]

    async def kinds(self) -> list[tuple[str, str]]:
        """Shape and state of each replica, sorted."""
        return sorted((shape, state) for shape, state, _ in (await self.replicas()).values())

    async def replicas(self) -> dict[str, tuple[str, str, int]]:
        """Shape, state and engine of each replica, as the leader knows them."""
        fleet = await self.ask((await self.leader())[0], "GET", "/fleet")
        found = (fleet or {"replicas": []})["replicas"]
        return {each["id"]: (each["shape"], each["state"], each["pid"]) for each in found}

    async def settle(self, shape: str, count: int) -> None:
        async def settled() -> bool:
            return await self.kinds() == [(shape, "ready")] * count

        await until(settled, f"{count} x {shape}")

    async def mode(self, mode: str) -> None:
        """Switch the mode at the leader, as often as it takes."""

        async def switched() -> bool:
            wanted = {"model": MODEL, "mode": mode}
            return bool(await self.ask((await self.leader())[0], "POST", "/mode", wanted))

        await until(switched, f"the mode is {mode}")

    @asynccontextmanager
    async def load(self) -> AsyncIterator[None]:
        """Requests through each gateway, two at a time, half of them streams; none may fail."""
        ending = asyncio.Event()
        tasks = [
            asyncio.create_task(self._ask_on(stack, ending, stream=stream))
            for stack in self.gateways
            for stream in (True, False)
        ]
        try:
            yield
        finally:
            ending.set()
            await asyncio.gather(*tasks)
        assert set(self.answers) == {"ok"}, self.answers

    async def _ask_on(self, stack: Stack, ending: asyncio.Event, *, stream: bool) -> None:
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 20, "ignore_eos": True, "stream": stream}
        while not ending.is_set():
            answer = await stack.http.post("/v1/completions", json=body)
            whole = answer.text.endswith("data: [DONE]\n\n") and '"error"' not in answer.text
            good = answer.status_code == 200 and (whole or not stream)
            self.answers["ok" if good else f"{answer.status_code} {answer.text[-200:]}"] += 1

    async def _serves(self, stack: Stack) -> bool:
        replicas = (await stack.admin.get("/admin/fleet")).json()["replicas"]
        return any(each["admissible"] for each in replicas)

    async def _close(self) -> None:
        for task in self._running:
            task.cancel()
        for process in self.plane.values():
            if process.returncode is None:
                process.kill()
            await process.wait()
        await self._client.aclose()
        for stack in self.gateways:
            await stack.close()
        database = Database(self.store)
        state = DatabaseStateDir(self.root / "controller-0", database, 2**40)
        actuator = LocalActuator(state, Cluster())
        await actuator.stop()
        await actuator.close()
        database.close()
