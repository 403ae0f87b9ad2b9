"""The real store: files in a folder and records in a database, both read by the next controller."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policy.config.deployment import ModelSpec
from policy.errors import AdapterRefused
from serve.adapters import adapter_store
from serve.adapters.adapter_store import AdapterStore
from store.adapters.base_model_shapes import BaseModelShapes
from store.progress_report import PreparedWeights, ProgressLine
from store.state_dir import StateDir
from tests.serve.sim_documents import deployment, sim_model
from tests.store.adapters.making import HIDDEN, MODULES, OUT, files, weights, write

SQL = ("m", "sql")
# Base models that adapters name: none, the first, and another.
BASES = ("", "org/first", "org/any")


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path / "state")


def open_store(state: StateDir) -> AdapterStore:
    return AdapterStore(state, f"sqlite:///{state.database_path}")


@pytest.fixture
def store(state: StateDir) -> AdapterStore:
    return open_store(state)


def spec(**adapters: Any) -> ModelSpec:
    return deployment(sim_model(adapters=adapters)).models[0]


def source(tmp_path: Path, seed: int = 1, **configuration: Any) -> str:
    return str(write(tmp_path / f"adapter-{seed}", files(seed, **configuration)))


def quiet(progress: ProgressLine) -> None:
    """Ignore the progress."""


def test_records_and_files_survive_a_restart(store: AdapterStore, state: StateDir, tmp_path: Path) -> None:
    steps: list[str] = []
    taken = store.take(spec(), source(tmp_path), lambda progress: steps.append(progress.step))
    assert {"fetch", "check", "store"} <= set(steps)
    alias = store.put(SQL, [taken], None, declared=True)
    assert (alias.versions[0].digest, alias.versions[0].rank, alias.split) == (taken.digest, 4, ((1, 1.0),))
    again = open_store(state)
    assert again.aliases() == (alias,)
    assert again.names.declared() == {SQL: {taken.source: taken.digest}}
    assert again.stored(alias.versions[0]) == taken


def test_adapters_over_a_limit_of_the_document_are_refused(store: AdapterStore, tmp_path: Path) -> None:
    with pytest.raises(AdapterRefused) as refused:
        store.take(spec(max_rank=2), source(tmp_path), quiet)
    assert refused.value.code == "rank"
    with pytest.raises(AdapterRefused) as refused:
        store.take(spec(max_bytes=1000), source(tmp_path), quiet)
    assert refused.value.code == "too_large"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("adapters", "declared", "code"),
    [
        ({}, False, "source_not_public"),
        ({"private_hosts": ["127.0.0.1"]}, False, "source_unreachable"),
        ({}, True, "source_unreachable"),
    ],
)
def test_only_declared_sources_may_name_any_host(
    store: AdapterStore, adapters: dict[str, Any], declared: bool, code: str
) -> None:
    with pytest.raises(AdapterRefused) as refused:
        store.take(spec(**adapters), "https://127.0.0.1:0/a.zip", quiet, declared=declared)
    assert refused.value.code == code


def test_only_files_that_no_alias_or_replica_uses_are_deleted(store: AdapterStore, tmp_path: Path) -> None:
    named, used, idle = (store.take(spec(), source(tmp_path, seed), quiet) for seed in (1, 2, 3))
    store.put(SQL, [named], None, declared=False)
    assert store.clear({f"old@{used.digest[:12]}"}, 3600.0) == []
    assert store.clear({f"old@{used.digest[:12]}"}, 0.0) == [idle.digest]
    assert [store.tar(each.digest) is not None for each in (named, used, idle)] == [True, True, False]


def test_stored_adapters_are_validated_for_another_base_model(store: AdapterStore, tmp_path: Path) -> None:
    bases = {"first": (OUT, HIDDEN), "other": (OUT, HIDDEN), "wide": (OUT, 2 * HIDDEN)}
    specs = {}
    for name, shape in bases.items():
        layers = {f"{module}.weight": np.zeros(shape, np.float32) for module in MODULES}
        folder = write(tmp_path / name, {"model.safetensors": weights(layers), "config.json": b"{}"})
        model = sim_model(engine="vllm", source=str(folder), adapters={})
        del model["sim"]
        specs[name] = deployment(model).models[0]
    named = {seed: source(tmp_path, seed, base_model_name_or_path=name) for seed, name in enumerate(BASES)}
    plain, of_first, forced = (
        store.take(specs["first"], at, quiet, any_base=name == "org/any").digest
        for name, at in zip(BASES, named.values(), strict=True)
    )
    digests, first = (plain, of_first, forced, "0" * 64), specs["first"].source
    assert store.refusals(specs["first"], digests, first, ()) == {}
    other = store.refusals(specs["other"], digests, first, ())
    assert other.keys() == {of_first}
    assert "base_model_name_or_path" in other[of_first]
    # What was refused before is not taken for an adapter that was added by force.
    assert store.refusals(specs["other"], digests, str(tmp_path / "wide"), other).keys() == {of_first}
    assert store.refusals(specs["wide"], digests, first, ()).keys() == {plain, of_first, forced}


def test_the_base_is_read_once(store: AdapterStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sim_model(engine="vllm", source="package:base", adapters={})
    del model["sim"]
    of_vllm = deployment(model).models[0]
    asked: list[str] = []

    def prepare(source: str, **options: Any) -> PreparedWeights:
        asked.append(source)
        return PreparedWeights(path=tmp_path, digest="0" * 64)

    monkeypatch.setattr(adapter_store, "prepare", prepare)
    monkeypatch.setattr(
        BaseModelShapes,
        "of",
        lambda directory, names: BaseModelShapes({"model.layers.0.mlp.up_proj": (8, 8)}),
    )
    for seed in (1, 2):
        with pytest.raises(AdapterRefused) as refused:
            store.take(of_vllm, source(tmp_path, seed), quiet)
        assert refused.value.code == "target_module"
    assert asked == ["package:base"]


def test_abandoned_downloads_are_deleted_while_the_controller_runs(
    store: AdapterStore, state: StateDir
) -> None:
    assert store.clear((), 0) == []
    parts = state.adapters / ".parts" / "of-a-presigned-url"
    parts.mkdir()
    (parts / "archive.part").write_bytes(b"x")
    store.clear((), 0)
    assert parts.exists()
    os.utime(parts, (1, 1))
    store.clear((), 0)
    assert not parts.exists()
