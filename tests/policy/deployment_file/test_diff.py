"""Invariants of the difference between two deployments, and the effect of each kind of change."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.config.deployment import Deployment
from policy.config.engine_revision import same_engines, used_shapes
from policy.deployment_file.diff import ChangeEffect, diff
from policy.deployment_file.parse import parse
from tests.policy.example_documents import EXTERNAL, GOOD, TENANTS, changed
from tests.serve.sim_documents import sim_model

Row = tuple[str, Any, ChangeEffect]
CHANGES: list[Row] = [
    ("models[0].source", "package:other", ChangeEffect.NEW_GENERATION),
    ("models[0].engine", "sim", ChangeEffect.NEW_GENERATION),
    ("models[0].runner", "pooling", ChangeEffect.NEW_GENERATION),
    ("models[0].engine_args.seed", 1, ChangeEffect.NEW_GENERATION),
    ("models[0].env.A", "1", ChangeEffect.NEW_GENERATION),
    # Settings of the simulator do not affect vLLM engines.
    ("models[0].sim.speed", 2.0, ChangeEffect.LIVE),
    ("models[0].shapes.large.cpus", 1, ChangeEffect.NEW_GENERATION),
    ("models[0].shapes.extra", {"cpus": 1}, ChangeEffect.LIVE),
    ("models[0].token_file", "/t", ChangeEffect.LIVE),
    ("models[0].mode", "multi-replica", ChangeEffect.LIVE),
    ("models[0].modes.multi-replica.replicas.max", 1, ChangeEffect.LIVE),
    # Running hosts take new timeouts.
    *(
        (f"models[0].control.{timeout}", 9.0, ChangeEffect.LIVE)
        for timeout in ("mode.drain_timeout_s", "progress_timeout_s", "start_timeout_s")
    ),
    ("budget.cpus", 4, ChangeEffect.LIVE),
    ("gateway.queue_timeout_s", 9.0, ChangeEffect.LIVE),
    ("gateway.port", 9000, ChangeEffect.RESTART),
    ("gateway.workers", 3, ChangeEffect.RESTART),
    ("store", "sqlite:////data/tidegate.db", ChangeEffect.RESTART),
    ("cluster.controller", "127.0.0.1:1", ChangeEffect.RESTART),
    # The SLO and the profile of a model do not affect its engines.
    ("models[0].control.slo.ttft_p95_s", 0.5, ChangeEffect.LIVE),
    ("models[0].profile", "l4-8b", ChangeEffect.LIVE),
    # Neither do scaling policies and bounds.
    ("models[0].priority", 1, ChangeEffect.LIVE),
    ("models[0].control.policy", {"static": {"replicas": 2}}, ChangeEffect.LIVE),
    ("models[0].control.shadow", "static", ChangeEffect.LIVE),
    ("models[0].control.guard.dry_run", True, ChangeEffect.LIVE),
    *(
        (f"models[0].control.{path}", value, ChangeEffect.LIVE)
        for path, value in (("tick_s", 1.0), ("scale.hold_s", 9.0), ("mode.gain", 0.3))
    ),
    ("budget.watts", 900.0, ChangeEffect.LIVE),
    # Engines with and without adapters differ.
    ("models[0].adapters.slots_per_replica", 4, ChangeEffect.NEW_GENERATION),
    ("gateway.coalesce.window_s", 0.0, ChangeEffect.LIVE),
    ("tenants[0].weight", 3.0, ChangeEffect.LIVE),
    ("tenants[1].keys_sha256", ["d" * 64], ChangeEffect.LIVE),
    ("upstreams[0].cost_cap_per_h", 9.0, ChangeEffect.LIVE),
]
# Paths name list entries.
NAMES = {"models[0]": "models[m]", "tenants[0]": "tenants[acme]", "tenants[1]": "tenants[bits]",
         "upstreams[0]": "upstreams[cloud]"}  # fmt: skip


def path_of(at: str) -> str:
    """The path in a difference of the key ``at``; a section that was absent differs as a whole."""
    entry, dot, key = at.partition(".")
    return NAMES.get(entry, entry) + dot + ("adapters" if key.startswith("adapters.") else key)


@pytest.mark.parametrize(("at", "value", "effect"), CHANGES, ids=[change[0] for change in CHANGES])
def test_one_change_is_one_line_with_its_effect(at: str, value: Any, effect: ChangeEffect) -> None:
    (change,) = diff(parse(TENANTS), parse(changed(TENANTS, at, value)))
    assert (change.path, change.effect) == (path_of(at), effect)
    assert change.before != change.after
    assert bool(change.why) == (effect is ChangeEffect.RESTART)


def several(chosen: list[Row]) -> Deployment:
    document = TENANTS
    for at, value, _ in chosen:
        document = changed(document, at, value)
    return parse(document)


subsets = st.lists(st.sampled_from(CHANGES), unique_by=lambda change: change[0])


@pytest.mark.slow
@given(subsets)
def test_a_diff_has_exactly_the_changed_paths(chosen: list[Row]) -> None:
    changes = diff(parse(TENANTS), several(chosen))
    assert {change.path for change in changes} == {path_of(at) for at, _, _ in chosen}


@pytest.mark.slow
@given(subsets, subsets)
def test_the_reverse_diff_swaps_before_and_after(one: list[Row], other: list[Row]) -> None:
    forward, back = diff(several(one), several(other)), diff(several(other), several(one))
    assert {(c.path, repr(c.before), repr(c.after), c.effect) for c in forward} == {
        (c.path, repr(c.after), repr(c.before), c.effect) for c in back
    }


@pytest.mark.slow
@given(subsets, subsets)
def test_a_diff_has_a_new_generation_if_and_only_if_engines_differ(one: list[Row], other: list[Row]) -> None:
    old, new = several(one), several(other)
    new_generation = any(change.effect is ChangeEffect.NEW_GENERATION for change in diff(old, new))
    spec = old.model("m")
    built = msgspec.structs.replace(spec, shapes=used_shapes(spec))
    assert new_generation is not same_engines(built, new.model("m"))


def test_a_shape_has_an_effect_only_if_a_mode_uses_it() -> None:
    idle = changed(TENANTS, "models[0].shapes.extra", {"cpus": 1})
    (change,) = diff(parse(idle), parse(changed(idle, "models[0].shapes.extra.max_in_flight", 3)))
    assert change.effect is ChangeEffect.LIVE
    # Using the shape adds engines of it, beside those of other shapes.
    used = changed(idle, "models[0].modes.multi-replica.shape", "extra")
    assert [change.effect for change in diff(parse(idle), parse(used))] == [ChangeEffect.LIVE]
    (change,) = diff(parse(used), parse(changed(used, "models[0].shapes.extra.max_in_flight", 3)))
    assert change.effect is ChangeEffect.NEW_GENERATION


def test_the_effect_of_a_key_depends_on_the_engine() -> None:
    new = changed(changed(TENANTS, "models[0].engine", "sim"), "models[0].sim.speed", 2.0)
    effects = {change.path: change.effect for change in diff(parse(TENANTS), parse(new))}
    assert effects == {
        "models[m].engine": ChangeEffect.NEW_GENERATION,
        "models[m].sim.speed": ChangeEffect.NEW_GENERATION,
    }
    moved = changed(new, "models[0].source", "package:other")
    (change,) = diff(parse(new), parse(moved))
    assert (change.path, change.effect) == ("models[m].source", ChangeEffect.LIVE)


def test_models_are_added_and_removed_live_beside_others() -> None:
    second = {**TENANTS["models"][0], "name": "n"}
    two = parse(changed(TENANTS, "models", [TENANTS["models"][0], second]))
    (added,) = diff(parse(TENANTS), two)
    (removed,) = diff(two, parse(TENANTS))
    assert (added.path, added.before, added.after, added.effect) == (
        "models[n]",
        None,
        "vllm",
        ChangeEffect.LIVE,
    )
    assert (removed.before, removed.after) == ("vllm", None)


def test_tenants_and_upstreams_are_compared_by_name() -> None:
    acme, bits = TENANTS["tenants"]
    swapped = parse(changed(TENANTS, "tenants", [bits, acme]))
    assert diff(parse(TENANTS), swapped) == ()
    without = parse(changed(changed(TENANTS, "tenants", [acme]), "upstreams", []))
    gone = diff(parse(TENANTS), without)
    assert [(c.path, c.after, c.effect) for c in gone] == [
        ("tenants[bits]", None, ChangeEffect.LIVE),
        ("upstreams[cloud]", None, ChangeEffect.LIVE),
    ]
    assert list(gone[0].before["keys_sha256"]) == ["b" * 64, "c" * 64]
    assert [(c.path, c.before) for c in diff(without, parse(TENANTS))] == [
        ("tenants[bits]", None),
        ("upstreams[cloud]", None),
    ]


def adapted(*sources: dict[str, Any], **over: Any) -> Deployment:
    return parse(changed(TENANTS, "models[0].adapters", {"sources": list(sources), **over}))


SQL, LAW = {"name": "sql", "source": "hf:org/sql"}, {"name": "law", "source": "/adapters/law"}


def test_adapters_are_compared_by_name_and_restart_nothing() -> None:
    old, new = adapted(SQL, LAW), adapted(LAW | {"tenants": ["acme"]}, SQL | {"source": "hf:org/sql@2"})
    assert [(c.path, c.before, c.after, c.effect) for c in diff(old, new)] == [
        ("models[m].adapters.sources[sql].source", "hf:org/sql", "hf:org/sql@2", ChangeEffect.LIVE),
        ("models[m].adapters.sources[law].tenants", (), ("acme",), ChangeEffect.LIVE),
    ]
    assert diff(old, adapted(LAW, SQL)) == ()
    (gone,) = diff(old, adapted(LAW))
    assert (gone.path, gone.before["source"], gone.after) == (
        "models[m].adapters.sources[sql]",
        "hf:org/sql",
        None,
    )
    assert same_engines(old.model("m"), new.model("m"))


def test_the_first_adapter_is_listed_with_the_new_generation() -> None:
    assert [(c.path, c.effect) for c in diff(parse(TENANTS), adapted(SQL))] == [
        ("models[m].adapters", ChangeEffect.NEW_GENERATION),
        ("models[m].adapters.sources[sql]", ChangeEffect.LIVE),
    ]


@pytest.mark.parametrize("key", ["slots_per_replica", "max_rank", "max_bytes"])
def test_adapter_limits_of_an_engine_make_a_new_generation(key: str) -> None:
    (change,) = diff(adapted(SQL), adapted(SQL, **{key: 3}))
    assert (change.path, change.effect) == (f"models[m].adapters.{key}", ChangeEffect.NEW_GENERATION)


def test_the_first_deployed_model_needs_a_restart() -> None:
    both = parse(changed(GOOD, "models", [*EXTERNAL["models"], *GOOD["models"]]))
    external = parse(changed(EXTERNAL, "budget", GOOD["budget"]))
    assert [change.effect for change in diff(external, both)] == [ChangeEffect.RESTART]
    assert [change.effect for change in diff(both, external)] == [ChangeEffect.RESTART]


def test_a_new_generation_on_shared_gpus_says_that_requests_wait() -> None:
    model = sim_model(
        sim={"profile": "sim-small", "wake_s": 1.0},
        shapes={"large": {"gpus": 2, "tensor_parallel": 2}, "small": {"gpus": 1}},
        modes={
            "single-large": {"shape": "large", "replicas": 1},
            "multi-replica": {"shape": "small", "replicas": {"min": 1, "max": 2}},
        },
    )
    document = {"models": [model]}
    (change,) = diff(parse(document), parse(changed(document, "models[0].sim.seed", 7)))
    assert change.effect is ChangeEffect.NEW_GENERATION
    assert "requests wait" in change.why
