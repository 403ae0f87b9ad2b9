"""External servers are probed, unless their answers show their health."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import httpx
import pytest

from gateway.routing import external_server_poller
from gateway.routing.external_server_poller import ExternalPoller
from gateway.routing.fleet import FleetView
from policy.deployment_file.parse import parse
from policy.types import Replica, ReplicaPhase

URL = "http://127.0.0.1:1"
TURNS = 6
LISTING = httpx.Response(200, json={"data": [{"id": "alpha", "max_model_len": 64}]})


class View:
    """A fleet with one server, with ``growth`` more answers at each check."""

    def __init__(self, growth: int) -> None:
        self.growth = growth
        self.total = 0
        self.turns: list[list[Replica]] = []
        self.asked = 0
        self.enough = asyncio.Event()

    def reads(self, model: str, url: str) -> int:
        assert (model, url) == ("alpha", URL)
        self.total += self.growth
        return self.total

    def is_answering(self, model: str, url: str) -> bool:
        return False

    def set_external(self, name: str, replicas: list[Replica], max_model_len: int | None) -> None:
        assert max_model_len in {None, 64}
        self.turns.append(replicas)
        if len(self.turns) == TURNS:
            self.enough.set()


async def probe(
    view: View, answers: Sequence[httpx.Response | Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a server ``TURNS`` times; it gives these answers, and repeats the last."""

    async def get(client: httpx.AsyncClient, url: str) -> httpx.Response:
        assert url == URL + "/v1/models"
        answer = answers[min(view.asked, len(answers) - 1)]
        view.asked += 1
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(httpx.AsyncClient, "get", get)
    monkeypatch.setattr(external_server_poller, "PROBE_EVERY_S", 0)
    document = parse({"models": [{"name": "alpha", "engine": "external", "urls": [URL + "/v1"]}]})
    task = asyncio.create_task(ExternalPoller(cast("FleetView", view), lambda: document).run())
    async with asyncio.timeout(20):
        await view.enough.wait()
    task.cancel()


@pytest.mark.parametrize(
    ("growth", "list_every_s", "asked"),
    [(0, 60.0, TURNS), (1, 60.0, 1), (1, 0.0, TURNS)],
    ids=["it answers no request", "it answers requests", "what is new there is due"],
)
async def test_a_server_is_probed_unless_its_answers_show_that_it_is_up(
    monkeypatch: pytest.MonkeyPatch, growth: int, list_every_s: float, asked: int
) -> None:
    monkeypatch.setattr(external_server_poller, "LIST_EVERY_S", list_every_s)
    view = View(growth)
    await probe(view, [LISTING], monkeypatch)
    assert view.asked == asked
    assert {replica.state for turn in view.turns for replica in turn} == {ReplicaPhase.READY}


async def test_a_failed_probe_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    view = View(1)
    nonsense = [b'{"data":[{"id":"\xff"}]}', b'{"x":' + b"[" * 100_000]
    failures = [httpx.ConnectError("refused"), httpx.Response(503)]
    failures += [httpx.Response(200, content=content) for content in nonsense]
    await probe(view, [*failures, LISTING], monkeypatch)
    assert view.asked == 5
    assert [turn[0].state for turn in view.turns[:5]] == [ReplicaPhase.STOPPED] * 4 + [ReplicaPhase.READY]
