"""Servers that Tidegate does not deploy are asked how they are, unless their answers say so."""

from __future__ import annotations

import asyncio
from typing import cast

import httpx
import pytest

from gateway.routing import external
from gateway.routing.external import ExternalPoller
from gateway.routing.fleet import FleetView
from policy.document.parse import parse
from policy.types import Replica, ReplicaPhase

URL = "http://127.0.0.1:1"
TURNS = 6


class View:
    """A fleet with one server. ``heard`` is by how much each look finds its answers grown."""

    def __init__(self, heard: int) -> None:
        self.heard = heard
        self.total = 0
        self.turns: list[list[Replica]] = []
        self.asked = 0
        self.enough = asyncio.Event()

    def reads(self, model: str, url: str) -> int:
        assert (model, url) == ("alpha", URL)
        self.total += self.heard
        return self.total

    def hears(self, model: str, url: str) -> bool:
        return False

    def set_external(self, name: str, replicas: list[Replica], max_model_len: int | None) -> None:
        assert max_model_len in {None, 64}
        self.turns.append(replicas)
        if len(self.turns) == TURNS:
            self.enough.set()


@pytest.fixture
def answers() -> list[httpx.Response | Exception]:
    """What the server says, the last one for ever."""
    return [httpx.Response(200, json={"data": [{"id": "alpha", "max_model_len": 64}]})]


async def probe(
    view: View, answers: list[httpx.Response | Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def get(client: httpx.AsyncClient, url: str) -> httpx.Response:
        assert url == URL + "/v1/models"
        answer = answers[min(view.asked, len(answers) - 1)]
        view.asked += 1
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(httpx.AsyncClient, "get", get)
    monkeypatch.setattr(external, "PROBE_EVERY_S", 0)
    document = parse({"models": [{"name": "alpha", "engine": "external", "urls": [URL + "/v1"]}]})
    task = asyncio.create_task(ExternalPoller(cast("FleetView", view), lambda: document).run())
    async with asyncio.timeout(20):
        await view.enough.wait()
    task.cancel()


def states(view: View) -> set[ReplicaPhase]:
    return {replica.state for turn in view.turns for replica in turn}


async def test_a_server_that_answers_nobody_is_asked_each_time(
    answers: list[httpx.Response | Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    view = View(heard=0)
    await probe(view, answers, monkeypatch)
    assert view.asked == TURNS
    assert states(view) == {ReplicaPhase.READY}


async def test_one_that_answers_requests_is_not(
    answers: list[httpx.Response | Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    view = View(heard=1)
    await probe(view, answers, monkeypatch)
    assert view.asked == 1
    assert states(view) == {ReplicaPhase.READY}


async def test_but_is_asked_what_is_new_there(
    answers: list[httpx.Response | Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external, "LIST_EVERY_S", 0.0)
    view = View(heard=1)
    await probe(view, answers, monkeypatch)
    assert view.asked == TURNS


async def test_what_was_not_well_when_it_was_asked_is_asked_again(
    answers: list[httpx.Response | Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    view = View(heard=1)
    await probe(view, [httpx.ConnectError("refused"), httpx.Response(503), *answers], monkeypatch)
    assert view.asked == 3
    assert [turn[0].state for turn in view.turns[:3]] == [
        ReplicaPhase.STOPPED,
        ReplicaPhase.STOPPED,
        ReplicaPhase.READY,
    ]
