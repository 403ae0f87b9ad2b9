"""A gateway worker process with faulty upstreams, and helpers of the tests."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
from pathlib import Path
from typing import Any

from store.state_dir import write_atomic
from tests.faults.faulty_upstream import FaultyUpstream
from tests.faults.postconditions import Postconditions
from tests.faults.proxy import Proxy
from tests.faults.raw_client import RawClient, Reply
from tests.gateway.worker import Stack, admin_client, model, until

_SAMPLE = re.compile(r"(?P<name>\w+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
POOLING = "vectors"
# In-flight requests of a replica that reports to be busy.
BUSY_IN_FLIGHT = 16


class Harness(Stack):
    """One worker, the fleet that the current test sets, and raw clients.

    Each of the ``tests`` that share it has a model of its own, with its own breakers, budgets and counts. No
    more: each model has 500 lines in a scrape, of which a test reads many.
    """

    gauges = ("tidegate_in_flight", "tidegate_queue_depth", "tidegate_queue_bytes")

    def __init__(
        self, root: Path, gateway: dict[str, Any] | None = None, *, tests: int = 1, **more: Any
    ) -> None:
        super().__init__(root)
        self.gateway = {"queue_timeout_s": 5, **(gateway or {})}
        names = [f"row-{number}" for number in range(tests)]
        self.models = [*(model(name, **more) for name in names), model(POOLING, runner="pooling")]
        self.upstreams: list[FaultyUpstream] = []
        self.clients: list[RawClient] = []
        self.tenants: list[dict[str, Any]] = []
        self.environment: dict[str, str] = {}
        self._fresh = iter(names)
        self._names = itertools.count(1)

    @property
    def port(self) -> int:
        return int(self.client_socket.getsockname()[1])

    @property
    def log(self) -> str:
        return (self.root / "worker.log").read_text()

    async def start_worker(self, number: int = 0) -> asyncio.subprocess.Process:
        path = self.root / "worker.log"
        with path.open("ab") as log:
            process = await self.spawn_worker(number, log, **self.environment)
        started = f'"pid":{process.pid}'
        await until(lambda: started in path.read_text() or process.returncode is not None, "a worker")
        assert process.returncode is None, self.log
        return process

    def write_document(self) -> None:
        document = {
            "models": self.models,
            "cluster": {"controller": self.controller_address},
            "gateway": self.gateway,
            "tenants": self.tenants,
        }
        write_atomic(self.root / "deployment.json", json.dumps(document).encode())

    @property
    def controller_address(self) -> str:
        return f"127.0.0.1:{self.controller.port}"

    async def reconnect_admin(self) -> None:
        await self.admin.aclose()
        self.admin = admin_client(self.admin_url, self.root)

    def fresh_model(self) -> str:
        return next(self._fresh)

    def upstream(self, model: str, **more: Any) -> FaultyUpstream:
        self.upstreams.append(FaultyUpstream(f"{model}-{next(self._names)}", model, **more))
        return self.upstreams[-1]

    async def fleet(self, model: str, count: int, **more: Any) -> list[FaultyUpstream]:
        made = [self.upstream(model, **more) for _ in range(count)]
        for upstream in made:
            await upstream.start()
        await self.ready(*made)
        return made

    async def publish(self, *aliases: dict[str, Any], key: str = "any") -> None:
        """Make ``aliases`` the catalog and wait until the worker follows it; ``key`` is one that sees all."""
        self.controller.publish(*aliases)
        # Another test's catalog may have the same names.
        wanted = sorted((one["name"], one["model"]) for one in aliases)
        headers = {"authorization": f"Bearer {key}", "connection": "close"}

        async def followed() -> bool:
            listed = (await self.http.get("/v1/models", headers=headers)).json()["data"]
            return sorted((each["id"], each["parent"]) for each in listed if each["parent"]) == wanted

        await until(followed, "the catalog is followed")

    async def put_behind_a_proxy(self, upstream: FaultyUpstream) -> Proxy:
        upstream.proxy = proxy = Proxy(upstream.port)
        await proxy.start()
        await self.ready(*self.upstreams)
        await until(lambda: len(proxy.links) > 0, "the load stream comes through the proxy")
        await until(lambda: self.admissible(upstream.id), "the replica is admissible")
        return proxy

    async def prefer(self, *wanted: FaultyUpstream) -> None:
        for one in self.upstreams:
            one.report(pretended=0 if one in wanted else BUSY_IN_FLIGHT)
        names = {one.id for one in wanted}

        async def seen() -> bool:
            links = (await self.admin.get("/admin/fleet")).json()["replicas"]
            return all((link["in_flight"] < BUSY_IN_FLIGHT) == (link["id"] in names) for link in links)

        await until(seen, "the load is seen")

    async def clear(self) -> None:
        """End the upstreams of a row, take them out of the fleet, and close what its clients left open."""
        self._leave()
        self.controller.set()
        for upstream in self.upstreams:
            await self._end(upstream)
        self.upstreams = []
        await until(lambda: self.admits(set()), "the fleet is empty")

    async def post(
        self,
        model: str,
        prompt: str = "hi",
        *,
        path: str = "/v1/chat/completions",
        headers: dict[str, str] | None = None,
        window_bytes: int | None = None,
        **more: Any,
    ) -> RawClient:
        body: dict[str, Any] = {"model": model, **more}
        if path in ("/v1/chat/completions", "/v1/messages"):
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt" if path == "/v1/completions" else "input"] = prompt
        client = await RawClient.post(self.url, path, body, headers, window_bytes=window_bytes)
        self.clients.append(client)
        return client

    async def ask(self, model: str, prompt: str = "hi", **more: Any) -> Reply:
        return await (await self.post(model, prompt, **more)).end()

    def expect(
        self, model: str, outcomes: dict[str, int] | None = None, attempts: int | None = None
    ) -> Postconditions:
        return Postconditions(self, model, outcomes, attempts)

    async def scrape(self, *names: str) -> str:
        """The metrics of ``names``: all take half a second of 40 models."""
        return (await self.admin.get("/metrics", params={"name[]": names})).text

    async def samples(
        self, name: str, scraped: str | None = None, **labels: str
    ) -> list[tuple[dict[str, str], float]]:
        found = []
        for line in (
            await self.scrape(re.sub("_(sum|count|bucket)$", "", name)) if scraped is None else scraped
        ).splitlines():
            if line.startswith(name) and (match := _SAMPLE.match(line)) is not None and match["name"] == name:
                found_labels = dict(_LABEL.findall(match["labels"] or ""))
                if labels.items() <= found_labels.items():
                    found.append((found_labels, float(match["value"])))
        return found

    async def serves(self, model: str, replica: str) -> None:
        """Send requests until one is served by ``replica``."""

        async def served() -> bool:
            reply = await self.ask(model, max_tokens=1)
            return reply.status == 200 and reply.headers["x-tidegate-replica"] == replica

        await until(served, f"{replica} serves")

    async def streams(self, model: str, count: int, events: int = 1, **more: Any) -> list[RawClient]:
        """Start ``count`` streams, each read up to its first ``events`` events."""
        clients = [await self.post(model, stream=True, **more) for _ in range(count)]
        for client in clients:
            await client.events(events)
        return clients

    async def admissible(self, replica: str) -> bool:
        links = (await self.admin.get("/admin/fleet")).json()["replicas"]
        return any(link["id"] == replica and link["admissible"] for link in links)

    async def ejections(self, model: str) -> float:
        """Ejections for what replicas answered: those for silence may be due to a busy machine."""
        scraped = await self.scrape("tidegate_ejections")
        assert "tidegate_ejections_total" in scraped
        found = await self.samples("tidegate_ejections_total", scraped, model=model)
        return sum(value for labels, value in found if labels["reason"] != "silence")

    async def out_of_rotation(self, replica: str) -> float:
        """Wait until ``replica`` gets no requests; returns the instant."""

        async def ejected() -> bool:
            return not await self.admissible(replica)

        await until(ejected, f"{replica} is out of rotation")
        return time.monotonic()

    def _leave(self) -> None:
        """Close the clients of a failed test, whose sockets a later test would report."""
        for client in self.clients:
            client.leave()
        self.clients = []

    async def close(self) -> None:
        self._leave()
        for upstream in self.upstreams:
            await self._end(upstream)
        await super().close()

    @staticmethod
    async def _end(upstream: FaultyUpstream) -> None:
        if upstream.proxy is not None:
            await upstream.proxy.stop()
        await upstream.stop()
