"""Each kind of invalid adapter has its code and a message with the cause, and leaves no files."""

from __future__ import annotations

import io
import json
import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policy.errors import AdapterRefused
from store.adapters import CONFIG, WEIGHTS
from store.adapters.archive import unpack
from store.adapters.blobs import AdapterBlobStore
from store.adapters.import_adapter import import_adapter
from tests.store.adapters.making import (
    HIDDEN,
    LIMITS,
    MODULES,
    OUT,
    TERMS,
    Tensors,
    files,
    half_pairs,
    header_of,
    member,
    named,
    tarred,
    weights,
    write,
    zipped,
)

Make = Callable[[Path], Path]
FIRST = named(MODULES[0], "A")


def configured(**configuration: Any) -> Make:
    return lambda root: write(root / "a", files(**configuration))


def config_text(text: bytes) -> Make:
    return lambda root: write(root / "a", {**files(), CONFIG: text})


def without(key: str) -> Make:
    config = {name: value for name, value in json.loads(files()[CONFIG]).items() if name != key}
    return config_text(json.dumps(config).encode())


def adapted(change: Callable[[Tensors], Any], **configuration: Any) -> Make:
    def make(root: Path) -> Path:
        tensors = half_pairs()
        change(tensors)
        return write(root / "a", {**files(**configuration), WEIGHTS: weights(tensors)})

    return make


def renamed(old: str, new: str) -> Make:
    def change(tensors: Tensors) -> None:
        found = {name.replace(old, new): array for name, array in tensors.items()}
        tensors.clear()
        tensors.update(found)

    return adapted(change)


def headed(change: Callable[[dict[str, Any]], Any]) -> Make:
    def make(root: Path) -> Path:
        tensors = half_pairs()
        header = header_of(tensors)
        change(header)
        return write(root / "a", {**files(), WEIGHTS: weights(tensors, header)})

    return make


def weighing(change: Callable[[bytes], bytes]) -> Make:
    return lambda root: write(root / "a", {**files(), WEIGHTS: change(files()[WEIGHTS])})


def only(names: dict[str, bytes]) -> Make:
    return lambda root: write(root / "a", names)


def packed(name: str, data: bytes) -> Make:
    def make(root: Path) -> Path:
        (root / name).write_bytes(data)
        return root / name

    return make


def special(create: Callable[[Path], object]) -> Make:
    def make(root: Path) -> Path:
        folder = write(root / "a", {CONFIG: files()[CONFIG]})
        create(folder / WEIGHTS)
        return folder

    return make


def link(path: Path) -> None:
    secret = path.parent.parent / "secret"
    secret.write_bytes(files()[WEIGHTS])
    path.symlink_to(secret)


def poisoned(number: float, dtype: str = "float32") -> Make:
    def change(tensors: Tensors) -> None:
        for name in tensors:
            tensors[name] = tensors[name].astype(dtype)
        tensors[named(MODULES[-1], "B")][-1, -1] = number

    return adapted(change)


def reshaped(name: str, *shape: int) -> Make:
    return adapted(lambda tensors: tensors.update({name: np.ones(shape, np.float32)}))


def shifted(header: dict[str, Any]) -> None:
    names = [name for name in header if name != "__metadata__"]
    begin, end = header[names[1]]["data_offsets"]
    header[names[1]]["data_offsets"] = [begin - 4, end - 4]


def gapped(header: dict[str, Any]) -> None:
    for name, entry in header.items():
        if name not in ("__metadata__", FIRST):
            entry["data_offsets"] = [offset + 4 for offset in entry["data_offsets"]]


def said_twice(root: Path) -> Path:
    text = json.dumps(header_of(half_pairs())).encode()
    entry = json.dumps({FIRST: header_of(half_pairs())[FIRST]}).encode()[1:-1]
    doubled = text[:-1] + b", " + entry + b"}"
    return write(root / "a", {**files(), WEIGHTS: weights(half_pairs(), doubled)})


def linked_in_zip(root: Path) -> Path:
    path = root / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        info = zipfile.ZipInfo(WEIGHTS)
        info.create_system, info.external_attr = 3, 0o120777 << 16
        archive.writestr(info, "/etc/passwd")
        archive.writestr(CONFIG, files()[CONFIG])
    return path


def bomb(*, lying: bool) -> Make:
    def make(root: Path) -> Path:
        data = zipped({WEIGHTS: bytes(5 * LIMITS.max_bytes), CONFIG: files()[CONFIG]})
        if lying:
            size = (5 * LIMITS.max_bytes).to_bytes(4, "little")
            data = data.replace(size, (1000).to_bytes(4, "little"))
        (root / "a.zip").write_bytes(data)
        return root / "a.zip"

    return make


def commented(comment: str, name: str = "f") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.pax_headers = {"comment": comment}
    return info


def sparse(root: Path) -> Path:
    folder = write(root / "a", files())
    with (folder / WEIGHTS).open("r+b") as file:
        file.truncate(50 * 2**30)
    return folder


BAD: list[tuple[str, Make, str, str]] = [
    # the configuration
    ("config missing", only({WEIGHTS: b""}), "not_an_adapter", "there is no adapter_config.json"),
    ("weights missing", only({CONFIG: b"{}"}), "not_an_adapter", "there is no adapter_model.safetensors"),
    ("empty folder", only({}), "not_an_adapter", "there is no adapter_config.json"),
    ("bad JSON", config_text(b"{"), "config_unreadable", "adapter_config.json is no JSON object"),
    ("no JSON object", config_text(b"[1]"), "config_unreadable", "adapter_config.json is no JSON object"),
    ("deep JSON", config_text(b'{"a":' * 100_000), "config_unreadable", "adapter_config.json is no JSON"),
    ("binary config", config_text(b"\xff\xfe"), "config_unreadable", "adapter_config.json is no JSON"),
    ("huge config", config_text(b" " * 1_500_000), "config_unreadable", "more than 1048576 bytes"),
    ("empty config", config_text(b""), "config_unreadable", "adapter_config.json is no JSON object"),
    ("another method", configured(peft_type="IA3"), "not_lora", "peft_type is 'IA3'"),
    ("no method", without("peft_type"), "not_lora", "peft_type is None"),
    ("DoRA by config", configured(use_dora=True), "dora", "use_dora is set"),
    ("no rank", without("r"), "rank", "the rank is None; expected 1 to 8"),
    ("rank too large", configured(r=64), "rank", "the rank is 64; expected 1 to 8"),
    ("rank 0", configured(r=0), "rank", "the rank is 0"),
    ("rank in words", configured(r="4"), "rank", "the rank is '4'"),
    ("rank true", configured(r=True), "rank", "the rank is True"),
    ("rank too large for some", configured(rank_pattern={"q_proj": 9}), "rank", "the rank is 9"),
    ("ranks that are none", configured(rank_pattern=[4]), "config_unreadable", "rank_pattern is [4]"),
    ("rank by an evil pattern", configured(rank_pattern={"(a+)+": 4}), "unsupported_feature", "'(a+)+'"),
    ("alpha by an evil pattern", configured(alpha_pattern={"(a+)+": 4}), "unsupported_feature", "'(a+)+'"),
    ("patterns", configured(rank_pattern={f"q{i}": 4 for i in range(999)}), "unsupported_feature", "512"),
    ("rank otherwise than the tensors", configured(rank_pattern={"q_proj": 2}), "tensor_shape", "the rank 2"),
    ("no alpha", without("lora_alpha"), "config_unreadable", "lora_alpha is None"),
    ("alpha in words", configured(alpha_pattern={"q": "x"}), "config_unreadable", "lora_alpha is 'x'"),
    ("no targets", without("target_modules"), "config_unreadable", "target_modules is None"),
    ("targets of numbers", configured(target_modules=[3]), "config_unreadable", "target_modules is [3]"),
    ("a target that is not there", configured(target_modules=["c_attn"]), "target_module", "'c_attn'"),
    ("a table as a target", configured(target_modules=["q", "lm_head"]), "target_module", "lm_head is a"),
    ("modules_to_save", configured(modules_to_save=["lm_head"]), "unsupported_feature", "modules_to_save"),
    ("bias", configured(bias="all"), "unsupported_feature", "bias is 'all'"),
    ("lora_bias", configured(lora_bias=True), "unsupported_feature", "lora_bias is True"),
    ("PiSSA", configured(init_lora_weights="pissa"), "unsupported_feature", "init_lora_weights is 'pissa'"),
    ("copied layers", configured(layer_replication=[[0, 2]]), "unsupported_feature", "layer_replication"),
    # the tensors
    ("DoRA by tensor", renamed("layers.1.self_attn.v_proj.lora_B.weight", "x.lora_magnitude_vector"), "dora",
     "belongs to DoRA"),
    ("other module names", renamed("self_attn", "attention"), "base_model", "no linear module model.layers"),
    ("more layers", renamed("layers.1", "layers.7"), "base_model", "model.layers.7.self_attn.q_proj"),
    ("another hidden size", reshaped(FIRST, 4, 2 * HIDDEN), "tensor_shape", "adapts (24, 32)"),
    ("other outputs", reshaped(named(MODULES[0], "B"), 2 * OUT, 4), "tensor_shape", "adapts (48, 16)"),
    ("another rank in a tensor", reshaped(FIRST, 2, HIDDEN), "tensor_shape", "expected the rank 4 in both"),
    ("three dimensions", reshaped(FIRST, 4, 4, 4), "tensor_shape", "has (4, 4, 4)"),
    ("half a pair", adapted(lambda tensors: tensors.pop(FIRST)), "tensor_missing", "q_proj has no lora_A"),
    ("no tensors", adapted(lambda tensors: tensors.clear()), "tensor_missing", "holds no tensors"),
    ("lm_head", renamed(MODULES[0], "lm_head"), "target_module", "lm_head is a table of tokens"),
    ("lora_embedding", renamed("layers.1.self_attn.v_proj.lora_A.weight", "embed_tokens.lora_embedding_A"),
     "unsupported_feature", "lora_embedding_A is no half of a LoRA module"),
    ("a bias of the up half", renamed("v_proj.lora_B.weight", "v_proj.lora_B.bias"), "unsupported_feature",
     "lora_B.bias is no half"),
    ("a name that becomes another", renamed(MODULES[0], f"base_model.model.{MODULES[1]}"),
     "unsupported_feature", "is no half of a LoRA module"),
    ("another type", adapted(lambda found: found.update({FIRST: np.ones((4, 16))})), "unsupported_feature",
     "is of F64; expected one of BF16, F16, F32"),
    ("NaN", poisoned(float("nan")), "not_finite", "v_proj.lora_B.weight holds numbers that are not finite"),
    ("infinity", poisoned(float("inf")), "not_finite", "v_proj.lora_B.weight"),
    ("minus infinity in half", poisoned(float("-inf"), "float16"), "not_finite", "v_proj.lora_B.weight"),
    # the file of the weights
    ("empty weights", weighing(lambda data: b""), "truncated", "has 0 bytes"),
    ("cut in the length", weighing(lambda data: data[:5]), "truncated", "has 5 bytes"),
    ("cut in the header", weighing(lambda data: data[:100]), "truncated", "ends within its header"),
    ("cut in a tensor", weighing(lambda data: data[:-100]), "truncated", "its header says"),
    ("cut by one byte", weighing(lambda data: data[:-1]), "truncated", "its header says"),
    ("bytes behind the end", weighing(lambda data: data + b"x"), "not_an_adapter", "1 bytes that belong to"),
    ("a huge header", weighing(lambda data: b"\xff" * 7 + b"\x7f" + data), "not_an_adapter", "a header of 9"),
    ("HTML", weighing(lambda data: b"<!DOCTYPE html>" * 99), "not_an_adapter", "is no safetensors file"),
    ("a pickle by another name", weighing(lambda data: b"\x80\x04\x95" + bytes(99)), "truncated", "header"),
    ("a header that is no JSON", weighing(lambda data: data[:8] + b"!" + data[9:]), "not_an_adapter",
     "no readable header"),
    ("a header that is a list", weighing(lambda data: weights({}, b"[1]")), "not_an_adapter", "no JSON"),
    ("a name twice", said_twice, "not_an_adapter", "occurs twice"),
    ("overlaps", headed(shifted), "not_an_adapter", "does not lie where its shape says"),
    ("gaps", headed(gapped), "not_an_adapter", "does not lie where its shape says"),
    ("a negative shape", headed(lambda h: h[FIRST].update(shape=[-4, -16])), "not_an_adapter", ">= 0"),
    ("another shape", headed(lambda h: h[FIRST].update(shape=[4, 15])), "not_an_adapter", "does not lie"),
    ("a shape of huge numbers", headed(lambda h: h[FIRST].update(shape=[2**62] * 16)), "not_an_adapter",
     "does not lie where"),
    ("a shape without end", headed(lambda h: h[FIRST].update(shape=[1] * 10_000)), "not_an_adapter", "<= 16"),
    ("offsets beyond the end", headed(lambda h: h[FIRST].update(data_offsets=[0, 10**9])), "not_an_adapter",
     "does not lie where"),
    ("an unknown type", headed(lambda h: h[FIRST].update(dtype="F128")), "not_an_adapter", "'F128'"),
    ("metadata of numbers", headed(lambda h: h.update(__metadata__={"a": 1})), "not_an_adapter", "header"),
    # the archive
    ("pickle only", only({CONFIG: files()[CONFIG], "adapter_model.bin": b"\x80"}), "pickle",
     "the weights are a pickle, which can run code (adapter_model.bin)"),
    ("pickle only in a zip", packed("a.zip", zipped({CONFIG: files()[CONFIG], "adapter_model.pt": b"x"})),
     "pickle", "adapter_model.pt"),
    ("a link", special(link), "path", "adapter_model.safetensors is a link"),
    ("a pipe", special(os.mkfifo), "path", "adapter_model.safetensors is no regular file"),
    ("a folder", special(Path.mkdir), "path", "adapter_model.safetensors is no regular file"),
    ("a hole", sparse, "too_large", "expected at most 2000000"),
    ("nothing there", lambda root: root / "nowhere", "source_unreachable", "No such file or directory"),
    ("no archive", packed("a.zip", b"hello"), "archive", "expected .zip, .tar or .tar.gz"),
    ("an empty archive file", packed("a.tar", b""), "archive", "it is no archive"),
    ("up in a zip", packed("a.zip", zipped({"../../x": b"", **files()})), "path", "'../../x'"),
    ("up in a tar", packed("a.tgz", tarred({"a/../../x": b"", **files()})), "path", "'a/../../x'"),
    ("absolute in a tar", packed("a.tgz", tarred({"/etc/x": b"", **files()})), "path", "'/etc/x'"),
    ("backslashes in a zip", packed("a.zip", zipped({"..\\x": b"", **files()})), "path", "a name that may"),
    ("a link in a tar", packed("a.tgz", tarred(files(), [member("x", tarfile.SYMTYPE, "/")])), "path", "'x'"),
    ("a hard link in a tar", packed("a.tgz", tarred({}, [member(WEIGHTS, tarfile.LNKTYPE, "x")])), "path",
     "is no regular file"),
    ("a device in a tar", packed("a.tar", tarred(files(), [member("d", tarfile.CHRTYPE)], compressed=False)),
     "path", "'d'"),
    ("a link in a zip", linked_in_zip, "path", "adapter_model.safetensors"),
    ("a bomb", bomb(lying=False), "too_large", "more than 2000000 bytes in it"),
    ("a bomb that lies", bomb(lying=True), "archive", "CRC"),
    ("a bomb in a tar", packed("a.tgz", tarred({WEIGHTS: bytes(5_000_000)})), "too_large", "2000000"),
    ("a bomb beside it", packed("a.tgz", tarred({**files(), "x": bytes(9_000_000)})), "too_large", "20000"),
    ("a thousand members", packed("a.tgz", tarred({**files(), **{f"f{i}": b"" for i in range(1200)}})),
     "archive", "more than 1000 members"),
    ("a huge header in a tar", packed("a.tgz", tarred({}, [commented("x" * 100_000)])), "archive",
     "a header of 100352 bytes"),
    ("many headers in a tar",
     packed("a.tgz", tarred({}, [commented("x" * 60_000, str(i)) for i in range(180)])), "archive",
     "more than is read"),
    ("a sparse file in a tar", packed("a.tar", tarred(files(), [member("x", tarfile.GNUTYPE_SPARSE)],
                                                      compressed=False)), "path", "'x'"),
    ("no name in a zip", packed("a.zip", zipped({"qx": b"", **files()}).replace(b"qx", b"\0x")), "path",
     "'\\x00x'"),
    ("a member twice", packed("a.tgz", tarred({f"./{CONFIG}": b"{}", **files()})), "archive", "twice"),
    ("two adapters", packed("a.tgz", tarred({f"{at}/{name}": data for at in "ab" for name, data in
                                             files().items()})), "archive", "in 2 folders"),
    ("too deep", packed("a.tgz", tarred({f"a/b/{name}": data for name, data in files().items()})),
     "not_an_adapter", "there is no adapter_config.json"),
    ("a broken gzip", packed("a.tgz", tarred(files())[:2] + b"\0" * 99), "archive", "cannot be read"),
    ("a gzip cut short", packed("a.tgz", tarred(files())[:600]), "truncated", "ends too early"),
    ("a tar cut short", packed("a.tar", tarred(files(), compressed=False)[:4000]), "truncated", "too early"),
    ("a zip cut short", packed("a.zip", zipped(files())[:-40]), "archive", "cannot be read"),
    ("zip of another method", packed("a.zip", zipped(files(), zipfile.ZIP_LZMA)), "archive", "by deflate"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "code", "message"), [each[1:] for each in BAD], ids=[each[0] for each in BAD]
)
def test_a_bad_adapter_is_refused(
    make: Make, code: str, message: str, tmp_path: Path, blobs: AdapterBlobStore
) -> None:
    source = make(tmp_path)
    with pytest.raises(AdapterRefused) as caught:
        import_adapter(blobs, str(source), TERMS, lambda _: None)
    assert (caught.value.code, message in str(caught.value)) == (code, True), str(caught.value)
    assert len(str(caught.value)) < 1000
    assert blobs.digests() == set()
    assert {path.name for path in (tmp_path / "adapters").iterdir()} <= {".parts", ".lock"}


def test_the_directory_of_a_zip_with_too_many_members_is_not_read(tmp_path: Path) -> None:
    data = zipped({f"{i}{'x' * 9000}": b"" for i in range(500)})
    with pytest.raises(AdapterRefused, match="a header of 4524390 bytes") as caught:
        unpack(io.BytesIO(data), tmp_path, max_bytes=10 * len(data))
    assert caught.value.code == "archive"
