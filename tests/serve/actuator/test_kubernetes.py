"""Scaling pods that Tidegate did not start, by a controller and a double of Kubernetes' API server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from policy.config.engine_revision import digest
from policy.deployment_file.diff import ChangeEffect, diff
from policy.errors import ActuatorFailed, ConfigError, NotLeader
from policy.scaling.reconcile_steps import LayerKey
from policy.types import ReplicaPhase
from policy.wire.heartbeat import Heartbeat
from serve.actuator.interface import deployment_id
from serve.actuator.kubernetes import KubernetesActuator
from serve.actuator.workload_objects import ANNOTATION, LABEL, KubernetesWorkload, WorkloadClient
from store.kubernetes.api_server import ObjectMetadata
from store.state_dir import StateDir
from tests.gateway.fake_replica import Exchange
from tests.gateway.fake_upstream import FakeUpstream
from tests.kubernetes_api import (
    DEPLOYMENTS,
    LEADER_WORKER_SETS,
    PODS,
    STATEFUL_SETS,
    KubernetesApi,
    merged,
)
from tests.serve.actuator.external_models import controlling, eventually, workloads
from tests.serve.sim_documents import deployment, external_model, sim_model

SMALL, LARGE = LayerKey("m", "small", 1), LayerKey("m", "large", 1)
METRICS = b"""vllm:num_requests_running{engine="0"} 3.0
vllm:num_requests_running{engine="1"} 2.0
vllm:num_requests_waiting{engine="0"} 1.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:prompt_tokens_total{engine="0"} 1e+03
vllm:generation_tokens_total{engine="0"} 10.0
"""


@pytest.fixture
async def api() -> AsyncIterator[KubernetesApi]:
    async with workloads() as made:
        yield made


def counts(api: KubernetesApi) -> tuple[int, int]:
    """The desired counts of both workloads."""
    small, large = api.of(STATEFUL_SETS, "small"), api.of(DEPLOYMENTS, "large")
    return small["spec"]["replicas"], large["spec"]["replicas"]


@pytest.mark.slow
async def test_pods_that_run_are_taken_over_and_scaled_and_switched(
    api: KubernetesApi, state: StateDir
) -> None:
    api.workload(STATEFUL_SETS, "small", replicas=3)
    control = {"policy": "static", "mode": {"drain_timeout_s": 5}}
    models = external_model(api.url, control=control), sim_model("own")
    async with controlling(state, *models) as controller:

        def ready() -> int:
            return controller.status().models[0].ready

        await eventually(lambda: ready() == 3)
        assert controller.status().models[0].target == 3
        assert controller.status().models[0].generation == 1
        controller.scale("m", 4)
        await eventually(lambda: ready() == 4)
        assert counts(api) == (4, 0)
        assert api.of(STATEFUL_SETS, "small")["metadata"]["labels"].keys() == {LABEL}
        # The other shape is made ready before the pods of this one end.
        controller.mode("m", "single-large")
        await eventually(lambda: counts(api) == (0, 1))
        controller.mode("m", "multi-replica")
        await eventually(lambda: counts(api) == (1, 0))
        controller.scale("m", 0)
        await eventually(lambda: counts(api) == (0, 0) and not api.pods("small"))
        assert {model.name: model.ready for model in controller.status().models} == {"m": 0, "own": 1}
    # What a later controller finds is what this one has left.
    async with controlling(state, *models) as controller:
        assert controller.status().models[0].target == 0


async def test_another_autoscaler_carries_out_the_counts(api: KubernetesApi, state: StateDir) -> None:
    model = external_model(api.url, kubernetes={"scaled_by": "autoscaler"})
    async with controlling(state, model) as controller:

        def of_fleet() -> dict[str, int]:
            return next((each.counts for each in controller.fleet().models), {})

        for count in (3, 0):
            controller.scale("m", count)
            await eventually(lambda count=count: of_fleet() == {"large": 0, "small": count})
            assert counts(api) == (0, 0)


async def test_what_pods_report(api: KubernetesApi, state: StateDir) -> None:
    async def answer(exchange: Exchange) -> None:
        assert not {name for name in exchange.headers if name.startswith("x-tidegate")}
        await exchange.reply(METRICS)

    server = FakeUpstream()
    server.answer = answer
    await server.start()
    api.pod_port = server.port
    api.slow = True
    (spec,) = deployment(external_model(api.url)).models
    actuator = KubernetesActuator(state, [spec])
    beats: dict[str, Heartbeat] = {}
    reporting = asyncio.create_task(
        actuator.report(lambda beat: beats.update({beat.replica.id: beat}), every_s=0.02)
    )
    await actuator.deploy(SMALL, spec, None, "d", 1)
    await eventually(lambda: bool(beats))
    (name,) = beats
    # The pod that takes its place has its name, and another uid.
    assert name == f"small-0-{api.of(PODS, 'small-0')['metadata']['uid']}"
    starting = beats[name].replica
    assert (starting.state, starting.node, starting.url) == (ReplicaPhase.STARTING, "node-1", "")
    pod = api.of(PODS, "small-0")
    waits = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no GPU"}
    fails = {"restartCount": 2, "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "boom"}}}
    api.change(PODS, "small-0", {**pod, "status": {"conditions": [waits], "containerStatuses": [fails]}})
    await eventually(lambda: beats[name].replica.failures == 2)
    assert beats[name].replica.reason == "boom"
    held = (await actuator.layers())[SMALL]
    assert (held.wanted, held.waits, held.unplaced) == (1, "no GPU", 1)
    api.become_ready()
    await eventually(lambda: beats[name].replica.load.tokens > 0)
    replica = beats[name].replica
    assert replica.start_s is not None
    load = replica.load
    assert (load.in_flight, load.running, load.waiting, load.kv_used, load.tokens) == (6, 5, 1, 0.25, 1010)
    # A pod that was evicted stays for a while, with its condition.
    api.change(PODS, "small-0", {**pod, "status": {"phase": "Failed"}})
    await eventually(lambda: beats[name].replica.state is ReplicaPhase.STOPPED)
    reporting.cancel()
    await actuator.close()
    await server.stop()


async def test_restarts_before_a_pod_was_ready_are_no_failures_after_it(
    api: KubernetesApi, state: StateDir
) -> None:
    """A probe that fails once, of a pod that is long in service, must not keep its model from scaling up."""
    api.slow = True
    (spec,) = deployment(external_model(api.url)).models
    actuator = KubernetesActuator(state, [spec])
    seen: list[tuple[ReplicaPhase, int, int]] = []

    def take(beat: Heartbeat) -> None:
        replica = beat.replica
        if (now := (replica.state, replica.incarnation, replica.failures)) not in seen[-1:]:
            seen.append(now)

    reporting = asyncio.create_task(actuator.report(take, every_s=0.02))
    await actuator.deploy(SMALL, spec, None, "d", 1)
    await eventually(lambda: bool(seen))
    for ready, restarts in ((False, 3), (True, 3), (False, 3), (True, 3), (False, 4), (False, 5), (True, 5)):
        before = len(seen)
        conditions = [{"type": "Ready", "status": str(ready)}]
        status = {"conditions": conditions, "containerStatuses": [{"restartCount": restarts}]}
        api.change(PODS, "small-0", {**api.of(PODS, "small-0"), "status": status})
        await eventually(lambda before=before: len(seen) > before)
    starting, serving = ReplicaPhase.STARTING, ReplicaPhase.READY
    assert seen[1:] == [
        (starting, 3, 3), (serving, 3, 0), (starting, 3, 0), (serving, 3, 0),
        (starting, 4, 1), (starting, 5, 2), (serving, 5, 0),
    ]  # fmt: skip
    reporting.cancel()
    await actuator.close()


async def test_failures_name_their_cause_and_keep_the_layers(api: KubernetesApi, state: StateDir) -> None:
    (spec,) = deployment(external_model(api.url)).models
    actuator = KubernetesActuator(state, [spec])
    await actuator.deploy(SMALL, spec, None, "d", 1)
    api.change(DEPLOYMENTS, "large", {"metadata": {"labels": {LABEL: "beef"}}, "spec": {"replicas": 2}})
    with pytest.raises(ActuatorFailed, match="deployment/large is scaled by another deployment, beef"):
        await actuator.deploy(LARGE, spec, None, "d", 1)
    (gone,) = deployment(external_model(api.url, name="n", kubernetes={"namespace": "none"})).models
    with pytest.raises(ActuatorFailed, match="there is no statefulset/small in the namespace none"):
        await actuator.deploy(LayerKey("n", "small", 1), gone, None, "d", 1)
    assert api.of(STATEFUL_SETS, "small")["metadata"]["annotations"][ANNOTATION]
    await api.stop()
    with pytest.raises(ActuatorFailed, match="does not answer"):
        await actuator.scale(SMALL, 2)
    assert set(await actuator.layers()) == {SMALL}
    await actuator.close()
    unknown = KubernetesActuator(state, [spec])
    with pytest.raises(ActuatorFailed, match="does not answer"):
        await unknown.layers()


async def test_one_workload_that_is_broken_holds_up_no_other(
    api: KubernetesApi, state: StateDir, caplog: pytest.LogCaptureFixture
) -> None:
    (spec,) = deployment(external_model(api.url)).models
    actuator = KubernetesActuator(state, [spec])
    await actuator.deploy(SMALL, spec, None, "d", 1)
    # Its controller is not installed.
    api.selects = False
    await actuator.deploy(LARGE, spec, None, "d", 1)
    assert set(await actuator.layers()) == {SMALL, LARGE}
    broken = {"metadata": {"annotations": {ANNOTATION: "{"}}}
    api.change(DEPLOYMENTS, "large", merged(api.of(DEPLOYMENTS, "large"), broken))
    # A controller that begins now asks at once.
    begun = KubernetesActuator(state, [spec])
    assert set(await begun.layers()) == {SMALL}
    assert "deployment/large: its scale has no selector" in caplog.text
    assert f"deployment/large has the label {LABEL}, but its annotation {ANNOTATION} is broken" in caplog.text
    await actuator.deploy(LARGE, spec, None, "d", 1)
    assert set(await actuator.layers()) == {SMALL, LARGE}
    for each in (actuator, begun):
        await each.close()


@pytest.mark.parametrize("paused", ["GET", "PATCH"], ids=["after it read", "between mark and scale"])
@pytest.mark.parametrize("collection", [STATEFUL_SETS, DEPLOYMENTS, LEADER_WORKER_SETS])
async def test_what_a_paused_leader_writes_after_the_next_one_is_refused(
    api: KubernetesApi, state: StateDir, collection: str, paused: str
) -> None:
    api.workload(collection, "own", replicas=2)
    model = external_model(api.url)
    model["shapes"]["small"]["workload"] = named = f"{collection.rpartition('/')[2][:-1]}/own"
    (spec,) = deployment(model).models
    one, two = (KubernetesActuator(state, [spec], term) for term in (1, 2))
    assert set(await one.layers()) == {SMALL}
    pauses = [f"{paused} {collection}/own"]

    async def follow(asked: str) -> None:
        if asked in pauses:
            pauses.clear()
            await two.scale(SMALL, 3)

    api.after = follow
    late = "an order of term 1 comes after one of term 2"
    with pytest.raises(NotLeader, match=late):
        await one.scale(SMALL, 1)
    # The new leader changed nothing of this one yet, and has begun its term there.
    service, writes = spec.discovery.kubernetes, WorkloadClient(deployment_id(state), 1)
    for order in (
        one.deploy(LARGE, spec, None, "d", 1), one.delete(SMALL), one.stop(),
        writes.write(KubernetesWorkload.of(service, "deployment/large"), None, 1),
        writes.delete_pod(KubernetesWorkload.of(service, named), ObjectMetadata(name="own-0"), 0),
    ):  # fmt: skip
        with pytest.raises(NotLeader, match=late):
            await order
    assert (api.of(collection, "own")["spec"]["replicas"], counts(api)[1]) == (3, 0)
    # Who is alone after that has no term; another deployment has terms of its own.
    await KubernetesActuator(state, [spec]).scale(SMALL, 1)
    for actuator in (one, two):
        await actuator.close()


async def test_a_pod_is_deleted_after_the_term_was_written(api: KubernetesApi) -> None:
    """A leader that is paused before is refused; one whose pod changes meanwhile writes its term again."""
    (spec,) = deployment(external_model(api.url)).models
    workload = KubernetesWorkload.of(spec.discovery.kubernetes, "statefulset/small")
    one, two = (WorkloadClient("beef", term) for term in (1, 2))
    api.scale(STATEFUL_SETS, "small", 2)
    first, second = (
        ObjectMetadata(name=name, uid=api.of(PODS, name)["metadata"]["uid"])
        for name in ("small-0", "small-1")
    )
    calls: list[str] = []

    async def watch(asked: str) -> None:
        if calls == ["PATCH", "GET"]:  # a status of the pod
            api.change(PODS, "small-0", api.of(PODS, "small-0"))
        if asked != f"GET {workload.path}":
            calls.append(asked.partition(" ")[0])

    api.before = watch
    await one.delete_pod(workload, first, 0)
    assert calls == ["PATCH", "GET", "DELETE"] * 2
    await eventually(lambda: api.of(PODS, "small-0")["metadata"]["uid"] != first.uid)
    pauses = [f"PATCH {workload.path}"]

    async def follow(asked: str) -> None:
        if asked in pauses:
            pauses.clear()
            await two.write(workload, None, 3)

    api.before = follow
    with pytest.raises(NotLeader, match="an order of term 1 comes after one of term 2"):
        await one.delete_pod(workload, second, 0)
    assert api.of(PODS, "small-1")["metadata"]["uid"] == second.uid


async def test_writes_of_others_are_no_failure(api: KubernetesApi, state: StateDir) -> None:
    (spec,) = deployment(external_model(api.url)).models
    actuator = KubernetesActuator(state, [spec], 1)
    await actuator.deploy(SMALL, spec, None, "d", 1)
    writes = 3

    async def write(asked: str) -> None:
        nonlocal writes
        if asked == f"GET {STATEFUL_SETS}/small" and writes > 0:
            writes -= 1
            api.change(STATEFUL_SETS, "small", api.of(STATEFUL_SETS, "small"))

    api.after = write
    await actuator.scale(SMALL, 2)
    assert (counts(api), writes) == ((2, 0), 0)
    writes = 100
    with pytest.raises(ActuatorFailed, match="statefulset/small: others wrote before each of 10 attempts"):
        await actuator.scale(SMALL, 3)
    await actuator.close()


def test_a_revision_is_a_workload() -> None:
    before = deployment(external_model("http://h:1"))
    model = external_model("http://h:1")
    model["shapes"]["small"] |= {"gpus": 4, "tensor_parallel": 4}
    assert digest(deployment(model).models[0]) == digest(before.models[0])
    model["shapes"]["small"]["workload"] = "leaderworkerset/next"
    changed = diff(before, deployment(model))
    assert {each.effect for each in changed if each.path.endswith("workload")} == {
        ChangeEffect.NEW_GENERATION
    }
    # What runs is taken over at the start only.
    static = {key: value for key, value in model.items() if key not in ("shapes", "modes")}
    own = sim_model("own")
    for one in ([own], [own, static]):
        assert ChangeEffect.RESTART in {
            each.effect for each in diff(deployment(*one), deployment(own, model))
        }


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"shapes": {"small": {"gpus": 1}}}, "shapes.small.workload"),
        ({"shapes": {"small": {"gpus": 1, "workload": "pod/x"}}}, "shapes.small.workload"),
        ({"shapes": {}}, "modes"),
        ({"engine": "sim", "discovery": None}, "shapes.large.workload"),
        ({"discovery": {"dns": "h:1"}}, "shapes"),
        (
            {"shapes": {name: {"cpus": 1, "workload": "deployment/a"} for name in ("large", "small")}},
            "shapes.small.workload",
        ),
    ],
)
def test_a_workload_belongs_to_one_shape_of_an_external_model(change: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError, match=rf"models\[0\]\.{path}"):
        deployment(external_model("http://h:1") | change)
