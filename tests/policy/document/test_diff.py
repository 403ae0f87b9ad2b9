"""Laws of the difference between two deployments, and what each kind of change takes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.config.deployment import Deployment
from policy.config.generation import same_engines, used_shapes
from policy.document.diff import Effect, diff
from policy.document.parse import parse
from tests.policy.example_documents import EXTERNAL, GOOD, TENANTS, changed

CHANGES: list[tuple[str, Any, str, Effect]] = [
    ("models[0].source", "package:other", "models[m].source", Effect.NEW_GENERATION),
    ("models[0].engine", "sim", "models[m].engine", Effect.NEW_GENERATION),
    ("models[0].runner", "pooling", "models[m].runner", Effect.NEW_GENERATION),
    ("models[0].engine_args.seed", 1, "models[m].engine_args.seed", Effect.NEW_GENERATION),
    ("models[0].env.A", "1", "models[m].env.A", Effect.NEW_GENERATION),
    # No engine of vLLM is made of what times the simulated one.
    ("models[0].sim.speed", 2.0, "models[m].sim.speed", Effect.LIVE),
    ("models[0].shapes.large.cpus", 1, "models[m].shapes.large.cpus", Effect.NEW_GENERATION),
    ("models[0].shapes.extra", {"cpus": 1}, "models[m].shapes.extra", Effect.LIVE),
    ("models[0].token_file", "/t", "models[m].token_file", Effect.LIVE),
    ("models[0].mode", "multi-replica", "models[m].mode", Effect.LIVE),
    (
        "models[0].modes.multi-replica.replicas.max",
        1,
        "models[m].modes.multi-replica.replicas.max",
        Effect.LIVE,
    ),
    (
        "models[0].control.mode.drain_timeout_s",
        9.0,
        "models[m].control.mode.drain_timeout_s",
        Effect.NEW_GENERATION,
    ),
    (
        "models[0].control.progress_timeout_s",
        9.0,
        "models[m].control.progress_timeout_s",
        Effect.NEW_GENERATION,
    ),
    ("models[0].control.start_timeout_s", 9.0, "models[m].control.start_timeout_s", Effect.LIVE),
    ("budget.cpus", 4, "budget.cpus", Effect.LIVE),
    ("gateway.queue_timeout_s", 9.0, "gateway.queue_timeout_s", Effect.LIVE),
    ("gateway.port", 9000, "gateway.port", Effect.RESTART),
    ("gateway.workers", 3, "gateway.workers", Effect.RESTART),
    ("store", "sqlite:////data/tidegate.db", "store", Effect.RESTART),
    ("cluster.controller", "127.0.0.1:1", "cluster.controller", Effect.RESTART),
    # What is promised and predicted of replicas is no part of them.
    ("models[0].control.slo.ttft_p95_s", 0.5, "models[m].control.slo.ttft_p95_s", Effect.LIVE),
    ("models[0].profile", "l4-8b", "models[m].profile", Effect.LIVE),
    # Nor who decides how many there are, within what.
    ("models[0].priority", 1, "models[m].priority", Effect.LIVE),
    ("models[0].control.tick_s", 1.0, "models[m].control.tick_s", Effect.LIVE),
    ("models[0].control.policy", {"static": {"replicas": 2}}, "models[m].control.policy", Effect.LIVE),
    ("models[0].control.shadow", "static", "models[m].control.shadow", Effect.LIVE),
    ("models[0].control.scale.hold_s", 9.0, "models[m].control.scale.hold_s", Effect.LIVE),
    ("models[0].control.mode.gain", 0.3, "models[m].control.mode.gain", Effect.LIVE),
    ("models[0].control.guard.dry_run", True, "models[m].control.guard.dry_run", Effect.LIVE),
    ("budget.watts", 900.0, "budget.watts", Effect.LIVE),
    # An engine that loads adapters is another than one that loads none.
    ("models[0].adapters.slots_per_replica", 4, "models[m].adapters", Effect.NEW_GENERATION),
    ("gateway.coalesce.window_s", 0.0, "gateway.coalesce.window_s", Effect.LIVE),
    ("tenants[0].weight", 3.0, "tenants[acme].weight", Effect.LIVE),
    ("tenants[1].keys_sha256", ["d" * 64], "tenants[bits].keys_sha256", Effect.LIVE),
    ("upstreams[0].cost_cap_per_h", 9.0, "upstreams[cloud].cost_cap_per_h", Effect.LIVE),
]


@pytest.mark.parametrize(("at", "value", "path", "effect"), CHANGES, ids=[change[0] for change in CHANGES])
def test_one_change_is_one_line_with_its_effect(at: str, value: Any, path: str, effect: Effect) -> None:
    (change,) = diff(parse(TENANTS), parse(changed(TENANTS, at, value)))
    assert (change.path, change.effect) == (path, effect)
    assert change.before != change.after
    assert bool(change.why) == (effect is Effect.RESTART)


def several(chosen: list[tuple[str, Any, str, Effect]]) -> Deployment:
    document = TENANTS
    for at, value, _, _ in chosen:
        document = changed(document, at, value)
    return parse(document)


subsets = st.lists(st.sampled_from(CHANGES), unique_by=lambda change: change[0])


@given(subsets)
def test_what_was_changed_is_what_is_said(chosen: list[tuple[str, Any, str, Effect]]) -> None:
    changes = diff(parse(TENANTS), several(chosen))
    assert {change.path for change in changes} == {path for _, _, path, _ in chosen}


@given(subsets, subsets)
def test_back_again_is_the_mirror_image(
    one: list[tuple[str, Any, str, Effect]], other: list[tuple[str, Any, str, Effect]]
) -> None:
    there, back = diff(several(one), several(other)), diff(several(other), several(one))
    assert {(c.path, repr(c.before), repr(c.after), c.effect) for c in there} == {
        (c.path, repr(c.after), repr(c.before), c.effect) for c in back
    }


@given(subsets)
def test_nothing_differs_from_itself(chosen: list[tuple[str, Any, str, Effect]]) -> None:
    assert diff(several(chosen), several(chosen)) == ()


@given(subsets, subsets)
def test_a_new_generation_is_said_when_one_is_made(
    one: list[tuple[str, Any, str, Effect]], other: list[tuple[str, Any, str, Effect]]
) -> None:
    old, new = several(one), several(other)
    said = any(change.effect is Effect.NEW_GENERATION for change in diff(old, new))
    spec = old.model("m")
    built = msgspec.structs.replace(spec, shapes=used_shapes(spec))
    assert said is not same_engines(built, new.model("m"))


def test_a_shape_counts_once_a_mode_uses_it() -> None:
    idle = changed(TENANTS, "models[0].shapes.extra", {"cpus": 1})
    (change,) = diff(parse(idle), parse(changed(idle, "models[0].shapes.extra.max_in_flight", 3)))
    assert change.effect is Effect.LIVE
    # To use it builds it, beside what runs of the others.
    used = changed(idle, "models[0].modes.multi-replica.shape", "extra")
    assert [change.effect for change in diff(parse(idle), parse(used))] == [Effect.LIVE]
    (change,) = diff(parse(used), parse(changed(used, "models[0].shapes.extra.max_in_flight", 3)))
    assert change.effect is Effect.NEW_GENERATION


def test_another_engine_is_made_of_other_things() -> None:
    new = changed(changed(TENANTS, "models[0].engine", "sim"), "models[0].sim.speed", 2.0)
    effects = {change.path: change.effect for change in diff(parse(TENANTS), parse(new))}
    assert effects == {
        "models[m].engine": Effect.NEW_GENERATION,
        "models[m].sim.speed": Effect.NEW_GENERATION,
    }
    moved = changed(new, "models[0].source", "package:other")
    (change,) = diff(parse(new), parse(moved))
    assert (change.path, change.effect) == ("models[m].source", Effect.LIVE)


def test_models_come_and_go_live_beside_others_of_ours() -> None:
    second = {**TENANTS["models"][0], "name": "n"}
    two = parse(changed(TENANTS, "models", [TENANTS["models"][0], second]))
    (added,) = diff(parse(TENANTS), two)
    (removed,) = diff(two, parse(TENANTS))
    assert (added.path, added.before, added.after, added.effect) == ("models[n]", None, "vllm", Effect.LIVE)
    assert (removed.before, removed.after) == ("vllm", None)


def test_tenants_and_upstreams_come_and_go_by_name() -> None:
    acme, bits = TENANTS["tenants"]
    swapped = parse(changed(TENANTS, "tenants", [bits, acme]))
    assert diff(parse(TENANTS), swapped) == ()
    without = parse(changed(changed(TENANTS, "tenants", [acme]), "upstreams", []))
    gone = diff(parse(TENANTS), without)
    assert [(c.path, c.after, c.effect) for c in gone] == [
        ("tenants[bits]", None, Effect.LIVE),
        ("upstreams[cloud]", None, Effect.LIVE),
    ]
    assert list(gone[0].before["keys_sha256"]) == ["b" * 64, "c" * 64]
    assert [(c.path, c.before) for c in diff(without, parse(TENANTS))] == [
        ("tenants[bits]", None),
        ("upstreams[cloud]", None),
    ]


def adapted(*sources: dict[str, Any], **over: Any) -> Deployment:
    return parse(changed(TENANTS, "models[0].adapters", {"sources": list(sources), **over}))


SQL, LAW = {"name": "sql", "source": "hf:org/sql"}, {"name": "law", "source": "/adapters/law"}


def test_adapters_come_change_and_go_by_name_and_restart_nothing() -> None:
    old, new = adapted(SQL, LAW), adapted(LAW | {"tenants": ["acme"]}, SQL | {"source": "hf:org/sql@2"})
    assert [(c.path, c.before, c.after, c.effect) for c in diff(old, new)] == [
        ("models[m].adapters.sources[sql].source", "hf:org/sql", "hf:org/sql@2", Effect.LIVE),
        ("models[m].adapters.sources[law].tenants", (), ("acme",), Effect.LIVE),
    ]
    assert diff(old, adapted(LAW, SQL)) == ()
    (gone,) = diff(old, adapted(LAW))
    assert (gone.path, gone.before["source"], gone.after) == (
        "models[m].adapters.sources[sql]",
        "hf:org/sql",
        None,
    )
    assert same_engines(old.model("m"), new.model("m"))


def test_the_first_adapter_of_a_model_is_told_beside_its_new_engines() -> None:
    assert [(c.path, c.effect) for c in diff(parse(TENANTS), adapted(SQL))] == [
        ("models[m].adapters", Effect.NEW_GENERATION),
        ("models[m].adapters.sources[sql]", Effect.LIVE),
    ]


@pytest.mark.parametrize("key", ["slots_per_replica", "max_rank", "max_bytes"])
def test_what_an_engine_can_hold_makes_it(key: str) -> None:
    (change,) = diff(adapted(SQL), adapted(SQL, **{key: 3}))
    assert (change.path, change.effect) == (f"models[m].adapters.{key}", Effect.NEW_GENERATION)


def test_the_first_model_of_ours_takes_a_new_start() -> None:
    both = parse(changed(GOOD, "models", [*EXTERNAL["models"], *GOOD["models"]]))
    external = parse(changed(EXTERNAL, "budget", GOOD["budget"]))
    assert [change.effect for change in diff(external, both)] == [Effect.RESTART]
    assert [change.effect for change in diff(both, external)] == [Effect.RESTART]
