"""A fake installed package, and a fake of the converter that needs PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# It writes what a conversion would, and counts itself, so that a test can say that it ran once.
CONVERTER = """
import json, pathlib, sys
source, target = map(pathlib.Path, sys.argv[1:])
with open({log!r}, "a") as log:
    log.write("run\\n")
print(json.dumps({{"step": "convert", "message": "half way", "fraction": 0.5}}), flush=True)
target.mkdir()
(target / "config.json").write_text("{{}}")
{middle}
(target / "model.safetensors").write_bytes(source.read_bytes()[::-1])
"""


class Converter:
    """A command to inject, and how often it ran."""

    def __init__(self, folder: Path, middle: str = "") -> None:
        self._log = folder / "runs.log"
        script = folder / "converter.py"
        script.write_text(CONVERTER.format(log=str(self._log), middle=middle))
        self.command = (sys.executable, "-I", "-S", str(script))

    @property
    def runs(self) -> int:
        return len(self._log.read_text().splitlines()) if self._log.exists() else 0


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; returns where models will be."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tidegate" / "models"


@pytest.fixture
def converter(tmp_path: Path) -> Converter:
    return Converter(tmp_path)


Install = Callable[[str, str, dict[str, bytes]], Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Make a distribution appear installed: ``install(name, version, files)`` returns its root."""
    root = tmp_path / "site"

    def put(name: str, version: str, files: dict[str, bytes]) -> Path:
        info = root / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
        for file, content in files.items():
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            (root / file).write_bytes(content)
        monkeypatch.syspath_prepend(str(root))
        return root

    return put
