"""The files of a Python package, installed or unpacked from its wheel, read as data and never run."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path, PurePosixPath

from policy.errors import ModelUnavailable
from store.preparation_progress import Progress, Report


def find_package(name: str, version: str | None, target: Path, report: Report) -> metadata.Distribution:
    """The installed package, else its wheel, unpacked into ``target``; without ``version`` the newest.

    Raises :class:`policy.errors.ModelUnavailable`.
    """
    with suppress(metadata.PackageNotFoundError):
        installed = metadata.distribution(name)
        if version in (None, installed.version):
            report(Progress(step="fetch", message=f"using the installed {name} {installed.version}"))
            return installed
    _download(f"{name}=={version}" if version else name, target, report)
    (unpacked,) = metadata.distributions(path=[str(target)])
    return unpacked


def files_of(package: metadata.Distribution) -> dict[str, Path]:
    """The files by their names inside the package, with `/` between the parts."""
    paths = {str(PurePosixPath(file)): Path(str(package.locate_file(file))) for file in package.files or ()}
    return {name: path for name, path in paths.items() if path.is_file()}


def _download(requirement: str, target: Path, report: Report) -> None:
    """Unpack only the wheel, by pip's own configuration; nothing is built or run."""
    report(Progress(step="fetch", message=f"downloading {requirement}"))
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
                report(Progress(step="fetch", message=text))
            if text.startswith("ERROR:") or "No module named" in text:
                errors.append(text)
    if child.returncode != 0:
        raise ModelUnavailable(f"pip found no wheel of {requirement}: {' '.join(errors)}")
