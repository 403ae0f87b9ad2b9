"""Which replicas a worker keeps when the controller's word and the replica's own differ."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from gateway.fleet import SETTLE_S, FleetView
from gateway.metrics import Metrics
from policy.types import EngineKind, Fleet, Load, Model, Replica, ReplicaState, Runner

MODEL = Model(name="alpha", runner=Runner.GENERATE, engine=EngineKind.SIM)
READY = b'{"state":"ready","load":{"at":1,"bound":8}}'
DRAINING = b'{"state":"draining","load":{"at":1,"bound":8}}'
RESTARTED_AT = 50.0


def fleet(epoch: float, *ids: str, version: int = 1) -> Fleet:
    replicas = tuple(
        Replica(
            id=id_,
            model="alpha",
            shape="s",
            generation=1,
            state=ReplicaState.READY,
            load=Load(at=0.0, bound=8),
            url="http://127.0.0.1:9",
        )
        for id_ in ids
    )
    return Fleet(epoch=epoch, version=version, at=0.0, models=(MODEL,), replicas=replicas)


class View(FleetView):
    """A view that follows two replicas of one controller."""

    def __init__(self) -> None:
        super().__init__("", Metrics())
        self.take(fleet(1.0, "one", "two"), "controller", 10.0)

    def say(self, line: bytes) -> None:
        """What both replicas' own streams tell."""
        for link in self.models[0].links:
            link.count(line, 0.0)

    @property
    def ids(self) -> list[str]:
        return [link.id for link in self.models[0].links]


@pytest.fixture
async def view() -> AsyncIterator[View]:
    view = View()
    yield view
    view.close()


async def test_a_restarted_controller_takes_no_replica_that_is_still_ready(view: View) -> None:
    view.say(READY)
    kept = list(view.models[0].links)
    view.take(fleet(2.0), "controller", RESTARTED_AT)
    assert view.models[0].links == kept
    assert all(link.admissible for link in kept)
    view.take(fleet(2.0, "two", version=2), "controller", RESTARTED_AT + SETTLE_S - 0.1)
    assert sorted(view.ids) == ["one", "two"]


async def test_once_it_has_settled_its_word_counts(view: View) -> None:
    view.say(READY)
    view.take(fleet(2.0), "controller", RESTARTED_AT)
    view.take(fleet(2.0, "two", version=2), "controller", RESTARTED_AT + SETTLE_S)
    assert view.ids == ["two"]


async def test_a_controller_that_was_here_all_along_is_obeyed_at_once(view: View) -> None:
    view.say(READY)
    view.take(fleet(1.0, "two", version=2), "controller", RESTARTED_AT)
    assert view.ids == ["two"]


@pytest.mark.parametrize("line", [None, DRAINING], ids=["silent", "draining"])
async def test_a_replica_that_is_not_ready_itself_is_dropped(view: View, line: bytes | None) -> None:
    if line is not None:
        view.say(line)
    view.take(fleet(2.0), "controller", RESTARTED_AT)
    assert view.ids == []


async def test_a_model_that_is_gone_takes_its_replicas_with_it(view: View) -> None:
    view.say(READY)
    view.take(Fleet(epoch=2.0, version=1, at=0.0), "controller", RESTARTED_AT)
    assert view.models == []
