"""Valid adapters in every form and archive format, and the stored files."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policy.errors import AdapterRefused
from store.adapters import CONFIG, FILES, WEIGHTS
from store.adapters.base_model_shapes import BaseModelShapes
from store.adapters.blobs import AdapterBlobStore
from store.adapters.import_adapter import ImportLimits, import_adapter
from store.adapters.validate import AdapterFacts, validate
from store.progress_report import ProgressLine
from tests.store.adapters.making import (
    BASE,
    CONFIGURATION,
    HIDDEN,
    LIMITS,
    MODULES,
    OUT,
    RANK,
    TERMS,
    files,
    half_pairs,
    header_of,
    named,
    tarred,
    weights,
    write,
    zipped,
)


def kept(blobs: AdapterBlobStore, source: Path) -> dict[str, bytes]:
    path = blobs.path(import_adapter(blobs, str(source), TERMS, lambda _: None).digest)
    assert path is not None
    return {each.name: each.read_bytes() for each in path.iterdir() if each.name != "manifest.json"}


@pytest.mark.parametrize(
    "configuration",
    [
        {},
        {"lora_alpha": 0.5, "use_rslora": True},
        {"target_modules": ".*_proj"},
        {"target_modules": ["self_attn.q_proj", "layers.1.self_attn.v_proj"]},
        {"rank_pattern": {"q_proj": RANK, "never": 8}, "alpha_pattern": {"v_proj": 32.0}},
        # The first pattern wins.
        {"rank_pattern": {"q_proj": RANK, "layers.0.self_attn.q_proj": 8}},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "EVA"},
        {"peft_type": "lora", "unknown_key": {"a": 1}},
    ],
)
def test_valid_configurations_are_accepted(configuration: dict[str, Any], tmp_path: Path) -> None:
    assert validate(write(tmp_path, files(**configuration)), BASE, LIMITS).rank in (RANK, 8)


def test_the_facts_are_the_largest_rank_and_the_bytes_of_the_files(tmp_path: Path) -> None:
    tensors = half_pairs()
    module = MODULES[1]
    tensors[named(module, "A")] = np.ones((8, HIDDEN), np.float16)
    tensors[named(module, "B")] = np.ones((OUT, 8), np.float16)
    config = {**CONFIGURATION, "rank_pattern": {f"^{module}$": 8}}
    content = {CONFIG: json.dumps(config).encode(), WEIGHTS: weights(tensors)}
    size = sum(map(len, content.values()))
    assert validate(write(tmp_path, content), BASE, LIMITS) == AdapterFacts(rank=8, size=size)


def test_bf16_weights_are_accepted_and_infinities_refused(tmp_path: Path) -> None:
    tensors = {name: array.astype(np.float16) for name, array in half_pairs().items()}
    header = header_of(tensors)
    for name, entry in header.items():
        if name != "__metadata__":
            entry["dtype"] = "BF16"
    content = {**files(), WEIGHTS: weights(tensors, header)}
    assert validate(write(tmp_path / "a", content), BASE, LIMITS).rank == RANK
    tensors[named(MODULES[0], "A")].view(np.uint16)[0, 0] = 0x7F80  # infinity, as BF16 has it
    content[WEIGHTS] = weights(tensors, header)
    with pytest.raises(AdapterRefused, match="NaN or infinite"):
        validate(write(tmp_path / "b", content), BASE, LIMITS)


def test_the_largest_finite_weights_are_accepted(tmp_path: Path) -> None:
    tensors = half_pairs()
    tensors[named(MODULES[0], "A")][:] = np.finfo(np.float32).max
    assert validate(write(tmp_path, {**files(), WEIGHTS: weights(tensors)}), BASE, LIMITS).rank == RANK


def test_without_a_base_its_modules_are_not_compared(tmp_path: Path) -> None:
    tensors = {name.replace("self_attn", "attention"): array for name, array in half_pairs().items()}
    content = {**files(target_modules=["c_attn"]), WEIGHTS: weights(tensors)}
    assert validate(write(tmp_path / "a", content), None, LIMITS).rank == RANK
    packed = BaseModelShapes(dict.fromkeys(MODULES, None))
    assert validate(write(tmp_path / "b", files()), packed, LIMITS).rank == RANK, "of unknown shapes"


def test_a_checkpoint_with_other_prefixes_is_accepted() -> None:
    base = BaseModelShapes({"model.language_model.layers.0.q": (4, 8), "model.visual.layers.0.q": (2, 6)})
    assert set(base.shapes("model.layers.0.q")) == {(4, 8), (2, 6)}
    assert base.shapes("model.visual.layers.0.q") == ((2, 6),)
    assert base.shapes("model.layers.1.q") == ()
    assert all(base.has(ending) for ending in ("q", "layers.0.q", "model.layers.0.q"))
    assert not base.has("k")


def test_a_base_is_read_from_its_files(tmp_path: Path) -> None:
    linear = {"model.layers.0.q.weight": np.zeros((4, 8), np.float32)}
    quantized = {"model.layers.0.k.qweight": np.zeros((2, 2), np.int32)}
    rest = {"model.norm.weight": np.zeros(8, np.float32), **quantized}
    for name, tensors in (("a", linear), ("b", rest)):
        (tmp_path / f"{name}.safetensors").write_bytes(weights(tensors))
    base = BaseModelShapes.of(tmp_path)
    assert base.shapes("model.layers.0.q") == ((4, 8),)
    assert base.shapes("model.norm") == ()
    assert base.shapes("model.layers.0.k") == (None,), "packed: of any shape"


@pytest.mark.parametrize("content", [None, b"x"])
def test_a_base_model_that_cannot_be_read_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(AdapterRefused, match="the base model") as caught:
        BaseModelShapes.of(tmp_path)
    assert caught.value.code == "base_model"


def boxed(names: dict[str, bytes], folder: str) -> dict[str, bytes]:
    return {f"{folder}/{name}": data for name, data in names.items()}


PACKED = {
    "zip": zipped(files()),
    "stored zip": zipped(files(), zipfile.ZIP_STORED),
    "zip with a folder": zipped(
        {"a/": b"", **boxed(files(), "a"), "__MACOSX/._a": b"x", "a/README.md": b"x"}
    ),
    "tar": tarred(files(), compressed=False),
    "tar.gz": tarred(files()),
    "tar of a folder": tarred(boxed(files(), "checkpoint-10")),
    "tar of .": tarred(boxed(files(), ".")),
    "tar with a long name": tarred({"x" * 200: b"", **files()}),
    "a pickle beside it": tarred({**files(), "optimizer.pt": b"x", "adapter_model.bin": b"x", "a/b/c": b"x"}),
}


@pytest.mark.parametrize("data", PACKED.values(), ids=PACKED)
def test_every_archive_format_is_unpacked(data: bytes, tmp_path: Path, blobs: AdapterBlobStore) -> None:
    (tmp_path / "any.name").write_bytes(data)
    assert kept(blobs, tmp_path / "any.name") == files()


def test_only_the_two_adapter_files_of_a_directory_are_kept(tmp_path: Path, blobs: AdapterBlobStore) -> None:
    extra = {"adapter_model.bin": b"\x80", "README.md": b"x", "training_args.bin": b"x"}
    folder = write(tmp_path / "a", {**files(), **extra})
    (folder / "checkpoint").mkdir()
    assert kept(blobs, folder) == files()


def test_a_directory_is_accepted_as_a_file_url_and_with_spaces(
    tmp_path: Path, blobs: AdapterBlobStore
) -> None:
    folder = write(tmp_path / "an adapter", files())
    by_url = import_adapter(blobs, f"file://{tmp_path}/an%20adapter", TERMS, lambda _: None)
    assert by_url.digest == import_adapter(blobs, str(folder), TERMS, lambda _: None).digest


def test_equal_content_of_any_source_has_the_same_digest(tmp_path: Path, blobs: AdapterBlobStore) -> None:
    (tmp_path / "a.zip").write_bytes(zipped(files()))
    first = import_adapter(blobs, str(tmp_path / "a.zip"), TERMS, lambda _: None)
    second = import_adapter(blobs, str(write(tmp_path / "a", files())), TERMS, lambda _: None)
    other = import_adapter(blobs, str(write(tmp_path / "b", files(seed=2))), TERMS, lambda _: None)
    assert first.digest == second.digest != other.digest
    assert blobs.digests() == {first.digest, other.digest}
    assert (first.facts, second.source) == (second.facts, str(tmp_path / "a"))


def test_a_stored_adapter_is_an_immutable_copy(tmp_path: Path, blobs: AdapterBlobStore) -> None:
    folder = write(tmp_path / "a", files())
    taken = import_adapter(blobs, str(folder), TERMS, lambda _: None)
    (folder / WEIGHTS).write_bytes(b"else")
    path = blobs.path(taken.digest)
    assert path is not None
    assert (path / WEIGHTS).read_bytes() == files()[WEIGHTS]
    assert [oct((path / name).stat().st_mode & 0o777) for name in FILES] == ["0o444", "0o444"]


def test_progress_is_reported_in_whole_percents(tmp_path: Path, blobs: AdapterBlobStore) -> None:
    reports: list[ProgressLine] = []
    import_adapter(blobs, str(write(tmp_path / "a", files())), ImportLimits(BASE, LIMITS), reports.append)
    steps = list(dict.fromkeys(each.step for each in reports))
    assert steps == ["fetch", "check", "store"]
    for step in ("fetch", "check"):
        fractions = [each.fraction for each in reports if each.step == step]
        assert fractions == sorted(set(fractions)), "each whole percent once"
        assert fractions[-1] == 1.0
