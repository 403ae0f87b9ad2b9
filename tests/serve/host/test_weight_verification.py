"""The weights of a revision: resolved once, stored, the same on every node, without blocking others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from policy.config.deployment import ModelSpec
from policy.errors import EngineFailed, ModelUnavailable
from policy.scaling.reconcile_steps import LayerKey
from policy.types import ReplicaPhase
from serve.host import weight_verification
from serve.host.weight_verification import ResolvedWeights, WeightsResolver, prepare_verified
from serve.state.desired_state import ModelTarget
from store.model_weights.prepare import WeightsOrigin
from store.progress_report import PreparedWeights
from tests.serve.plane import NEW_SMALL, READY, SMALL, Plane
from tests.serve.sim_documents import deployment, document, sim_model

HUB, PACKAGE = "org/name", "package:p"


@dataclass
class Store:
    """Answers ``prepare`` in a thread once it is ``open``; a source without a digest is not available."""

    digests: dict[str, str] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    open: threading.Event = field(default_factory=threading.Event)

    def __call__(self, source: str, **_: Any) -> PreparedWeights:
        self.asked.append(source)
        self.open.wait()
        if source not in self.digests:
            raise ModelUnavailable(f"no {source}")
        return PreparedWeights(path=Path("/w"), digest=self.digests[source])


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    made = Store()
    made.open.set()
    monkeypatch.setattr(weight_verification, "prepare_weights", made)
    return made


def model(source: str, name: str = "m", **over: Any) -> dict[str, Any]:
    return sim_model(name, engine="vllm", source=source, **over)


def spec(source: str) -> ModelSpec:
    return deployment(model(source)).models[0]


async def until(plane: Plane, true: Callable[[], bool]) -> None:
    while not true():
        await plane.ticks(1)
        await asyncio.sleep(0.001)


def kept(plane: Plane) -> dict[int, ResolvedWeights]:
    found = plane.state.load(plane.state.targets_path, dict[str, ModelTarget])
    assert found is not None
    return found["m"].weights


def folder(path: Path, content: str = "1") -> str:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_text(content)
    return str(path)


async def test_a_branch_stays_at_its_commit_for_the_life_of_a_revision(plane: Plane, store: Store) -> None:
    store.digests[HUB] = "c0ffee00ff"
    await plane.up(document(model(HUB)))
    await until(plane, lambda: plane.counts(READY) == {SMALL: 1})
    pinned = {1: ResolvedWeights(origin=WeightsOrigin.HUB, source=f"{HUB}@c0ffee00ff", digest="c0ffee00ff")}
    assert kept(plane) == pinned
    assert plane.cluster.held[SMALL].digest.endswith("c0ffee00")
    # Neither another layer nor a restart nor an apply resolves it again, though the branch has moved.
    store.digests[HUB] = "beef"
    plane.controller.mode("m", "single-large")
    await plane.ticks()
    await plane.restart()
    plane.controller.apply(document(model(HUB)))
    await plane.ticks()
    assert plane.counts(READY) == {LayerKey("m", "large", 1): 1}
    assert (store.asked, kept(plane)) == ([HUB], pinned)


async def test_a_revision_without_replicas_is_resolved_again(plane: Plane, store: Store) -> None:
    store.digests[HUB] = "old"
    await plane.up(document(model(HUB)))
    await until(plane, lambda: plane.counts(READY) == {SMALL: 1})
    plane.cluster.held.clear()
    plane.cluster.replicas.clear()
    store.digests[HUB] = "new"
    await plane.restart()
    await until(plane, lambda: plane.counts(READY) == {SMALL: 1})
    assert kept(plane)[1].digest == "new"


async def test_other_models_start_while_weights_are_resolved(plane: Plane, store: Store) -> None:
    store.open.clear()
    store.digests[PACKAGE] = "a"
    await plane.ready(document(model(PACKAGE), sim_model("other")))
    assert plane.counts(READY) == {LayerKey("other", "small", 1): 1}
    store.open.set()
    await until(plane, lambda: SMALL in plane.counts(READY))


async def test_replicas_are_not_stopped_for_weights_that_are_unavailable(plane: Plane, store: Store) -> None:
    store.digests[PACKAGE] = "a"
    shapes = {"large": {"gpus": 1}, "small": {"gpus": 1}}
    modes = {"multi-replica": {"shape": "small", "replicas": {"min": 2, "max": 2}}}
    over = {"shapes": shapes, "modes": modes}
    await plane.up(document(model(PACKAGE, **over), budget={"gpus": 2}))
    await until(plane, lambda: plane.counts(READY) == {SMALL: 2})
    await plane.ticks()
    plane.controller.apply(document(model("package:none", **over), budget={"gpus": 2}))
    await until(plane, lambda: "rolled back" in plane.note())
    assert plane.note().endswith("the weights are not available: no package:none")
    await plane.ticks()
    assert plane.counts(READY) == {SMALL: 2}
    assert plane.cluster.held.keys() == {SMALL}


async def test_unavailable_weights_are_retried(plane: Plane, store: Store) -> None:
    await plane.up(document(model(PACKAGE)))
    await until(plane, lambda: len(store.asked) == 2)
    await until(plane, lambda: "no package:p" in plane.note())
    assert any("m: the weights are not available" in event for event in plane.controller.status().events)
    store.digests[PACKAGE] = "a"
    await until(plane, lambda: plane.counts(READY) == {SMALL: 1})
    assert plane.note() == ""


async def test_a_directory_changed_in_place_is_new_once_applied(plane: Plane, tmp_path: Path) -> None:
    written = document(model(folder(tmp_path / "w")))
    await plane.up(written)
    await until(plane, lambda: plane.counts(READY) == {SMALL: 1})
    running = set(plane.cluster.replicas)
    folder(tmp_path / "w", "22")
    await plane.ticks()
    await plane.restart()
    await plane.ticks()
    assert set(plane.cluster.replicas) == running
    plane.cluster.slow = True
    plane.controller.apply(written)
    await until(plane, lambda: plane.counts(ReplicaPhase.STARTING) == {NEW_SMALL: 1})
    assert plane.counts(READY) == {SMALL: 1}
    plane.cluster.slow = False
    plane.cluster.ready()
    await until(plane, lambda: plane.counts() == {NEW_SMALL: 1})
    await plane.ticks()
    first = kept(plane)
    assert set(first) == {2}
    # An apply without a change keeps the revision.
    plane.controller.apply(written)
    await until(plane, lambda: not plane.controller._weights._applied)
    await plane.ticks()
    assert (plane.counts(), kept(plane)) == ({NEW_SMALL: 1}, first)


async def test_a_controller_without_state_detects_other_weights(plane: Plane, tmp_path: Path) -> None:
    await plane.up(document(model(folder(tmp_path / "w"))))
    await until(plane, lambda: plane.counts(READY) == {SMALL: 1})
    running = set(plane.cluster.replicas)
    plane.state.targets_path.unlink()
    await plane.restart()
    await until(plane, lambda: bool(kept(plane)))
    await plane.ticks()
    assert set(plane.cluster.replicas) == running
    plane.state.targets_path.unlink()
    folder(tmp_path / "w", "22")
    await plane.restart()
    await until(plane, lambda: plane.counts() == {NEW_SMALL: 1})


async def test_the_simulated_engine_resolves_no_weights(plane: Plane, store: Store) -> None:
    await plane.ready(document(sim_model(source=PACKAGE)))
    assert plane.counts(READY) == {SMALL: 1}
    assert (store.asked, kept(plane)) == ([], {})


async def test_retries_back_off_and_another_source_is_tried_at_once(store: Store) -> None:
    now = 0.0
    done = asyncio.Event()
    resolver = WeightsResolver(lambda: now, done.set)

    async def attempt(source: str) -> ResolvedWeights:
        while (found := resolver.weights(spec(source))) is None:
            done.clear()
            await done.wait()
        return found

    for wait_s in (1.0, 2.0, 4.0):
        with pytest.raises(ModelUnavailable, match="no org/name"):
            await attempt(HUB)
        asked = len(store.asked)
        now += 0.9 * wait_s
        assert resolver.weights(spec(HUB)) is None
        assert len(store.asked) == asked
        now += 0.1 * wait_s
    store.digests[PACKAGE] = "a"
    # The result of another source is not used.
    assert resolver.weights(spec(HUB)) is None
    assert await attempt(PACKAGE) == ResolvedWeights(origin=WeightsOrigin.PACKAGE, source=PACKAGE, digest="a")


@pytest.mark.parametrize(
    ("origin", "same"),
    [(WeightsOrigin.PACKAGE, False), (WeightsOrigin.HUB, False), (WeightsOrigin.DIRECTORY, True)],
)
def test_different_weights_on_a_node_are_an_error(store: Store, origin: WeightsOrigin, same: bool) -> None:
    store.digests["s"] = "here"
    head = ResolvedWeights(origin=origin, source="s", digest="there")
    if same:
        assert prepare_verified(head, token_file=None, progress=print, prepare=store).digest == "here"
        return
    with pytest.raises(EngineFailed, match="on this node have the digest here, those of the head there"):
        prepare_verified(head, token_file=None, progress=print, prepare=store)
    equal = msgspec.structs.replace(head, digest="here")
    assert prepare_verified(equal, token_file=None, progress=print, prepare=store).path == Path("/w")
