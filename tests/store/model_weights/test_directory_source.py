"""A local directory is used in place, or refused with the missing files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from policy.errors import ModelUnavailable
from store.model_weights.directory_source import prepare_directory


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def test_the_digest_is_stable_and_changes_with_the_content(model: Path) -> None:
    first = prepare_directory(model).digest
    assert prepare_directory(model).digest == first
    config = model / "config.json"
    before = config.stat()
    config.write_text("[]")
    os.utime(config, ns=(before.st_atime_ns, before.st_mtime_ns))
    second = prepare_directory(model).digest
    assert second != first
    os.utime(model / "model.safetensors", ns=(1, 1))
    assert prepare_directory(model).digest not in (first, second)


@pytest.mark.parametrize(
    ("missing", "message"),
    [("config.json", r"lacks config.json$"), ("model.safetensors", r"lacks \*.safetensors$")],
)
def test_a_missing_file_is_named(model: Path, missing: str, message: str) -> None:
    (model / missing).unlink()
    with pytest.raises(ModelUnavailable, match=message):
        prepare_directory(model)


def test_a_path_that_is_no_directory_is_named(model: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"nowhere does not exist"):
        prepare_directory(model / "nowhere")
    with pytest.raises(ModelUnavailable, match=r"config.json is not a directory"):
        prepare_directory(model / "config.json")


def shards(*numbers: int) -> list[str]:
    return [f"model-{number:05}-of-00002.safetensors" for number in numbers]


@pytest.mark.parametrize(
    ("indexed", "here", "lacks"),
    [
        (shards(1, 2), shards(1, 2), ""),
        (shards(1, 2), shards(1), "lacks model-00002-of-00002.safetensors: it was not copied"),
        (["a.safetensors", "b.safetensors"], ["b.safetensors"], "lacks a.safetensors"),
        ([], shards(2), "lacks 1 of the files model-\\*-of-00002.safetensors"),
        ([], shards(0, 1), ""),
        # Such as the index of the model that this one was made from.
        (shards(1, 2), ["other.safetensors"], ""),
        # An index may leave out a shard that the model does without.
        (shards(1), shards(1), ""),
    ],
)
def test_all_shards_must_be_there(indexed: list[str], here: list[str], lacks: str, model: Path) -> None:
    (model / "model.safetensors").unlink()
    if indexed:
        index = {
            "metadata": {"total_size": 2},
            "weight_map": {f"w{i}": name for i, name in enumerate(indexed)},
        }
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in here:
        (model / name).write_bytes(b"weights")
    if lacks:
        with pytest.raises(ModelUnavailable, match=lacks):
            prepare_directory(model)
    else:
        assert prepare_directory(model).path == model


@pytest.mark.parametrize("content", ["", "[]", '{"weight_map": {"w": 1}}'])
def test_an_index_that_cannot_be_read_is_named(content: str, model: Path) -> None:
    (model / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelUnavailable, match=r"index.json cannot be read"):
        prepare_directory(model)
