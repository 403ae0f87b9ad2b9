"""A local directory is used in place, or refused with the missing files."""

from __future__ import annotations

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
