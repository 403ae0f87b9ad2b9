"""Compiled modules: never used for other sources than their own, and tested as the sources are."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from store import compiled_modules

ROOT = Path(__file__).parents[2]
RUN = """
import sys
from store import compiled_modules
assert compiled_modules.use() == ""
import policy.routing.router as router
assert router.__file__.endswith(".so"), router.__file__
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-m", "not (slow or process)", *sys.argv[1:]]))
"""


def _setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tidegate_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SETUP = _setup()


@pytest.mark.slow
def test_compiled_modules_make_the_decisions_of_the_sources() -> None:
    if compiled_modules.state()[1]:
        pytest.skip("no machine code of these sources: scripts/install makes it")
    folders = (f"tests/policy/{folder}" for folder in ("admission", "routing", "stats"))
    tested = subprocess.run(
        [sys.executable, "-c", RUN, *folders], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert tested.returncode == 0, tested.stdout[-4000:]


def test_every_compiled_module_exists() -> None:
    assert [source for source in SETUP.SOURCES if not (ROOT / source).is_file()] == []


@pytest.mark.slow
def test_no_structure_of_another_library_is_compiled() -> None:
    found = []
    for source in SETUP.SOURCES:
        for node in ast.walk(ast.parse((ROOT / source).read_text())):
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
                found += [f"{source}: {node.name}"] if {"Struct", "Structure"} & set(bases) else []
    assert found == []


@pytest.mark.slow
def test_no_error_is_raised_again_after_an_await() -> None:
    """Machine code forgets which one it was."""
    found = []
    for source in SETUP.SOURCES:
        for node in ast.walk(ast.parse((ROOT / source).read_text())):
            if isinstance(node, ast.ExceptHandler):
                inside = list(ast.walk(node))
                plain = any(isinstance(each, ast.Raise) and each.exc is None for each in inside)
                awaits = any(isinstance(each, ast.Await) for each in inside)
                found += [f"{source}:{node.lineno}"] if plain and awaits else []
    assert found == []


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one source, whose machine code is said to be built."""
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "hashing.py").write_text("a = 1")
    monkeypatch.setattr(compiled_modules, "ROOT", tmp_path)
    monkeypatch.setattr(compiled_modules, "FOLDER", tmp_path / "built")
    compiled_modules.record(compiled_modules.FOLDER, compiled_modules.digest(), "")
    return tmp_path


def test_machine_code_is_used_until_a_source_changes(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compiled_modules.main() == 0
    (checkout / "policy" / "hashing.py").write_text("a = 2")
    assert compiled_modules.main() == 2
    assert "slower: the sources have changed since it was built" in capsys.readouterr().out
    assert compiled_modules.use() == "the sources have changed since it was built"


def test_without_a_compiler_another_installation_is_of_no_use(checkout: Path) -> None:
    compiled_modules.record(compiled_modules.FOLDER, compiled_modules.digest(), "no C compiler")
    assert compiled_modules.state() == (1, "no C compiler")
    (checkout / "built" / compiled_modules.RECORD).unlink()
    assert compiled_modules.state() == (2, "none was built")


def test_modules_are_found_in_the_folder_of_the_build(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    file = checkout / "built" / "policy" / f"hashing{compiled_modules.SUFFIX}"
    file.parent.mkdir()
    file.touch()
    assert compiled_modules.use() == ""
    (finder, *_) = sys.meta_path
    found = finder.find_spec("policy.hashing", None)
    assert found is not None and found.origin == str(file)
    assert finder.find_spec("policy.errors", None) is None


def test_an_object_is_compiled_again_when_what_it_was_made_of_is_newer(tmp_path: Path) -> None:
    made, header = tmp_path / "a.o", tmp_path / "a.h"
    assert not SETUP.is_current(made)
    header.touch()
    (tmp_path / "a.d").write_text(f"a.o: {header} \\\n {header}\n")
    made.touch()
    later = time.time() + 10
    os.utime(made, (later, later))
    assert SETUP.is_current(made)
    os.utime(header, (later + 10, later + 10))
    assert not SETUP.is_current(made)


def test_a_record_says_what_was_built(checkout: Path) -> None:
    built = json.loads((checkout / "built" / compiled_modules.RECORD).read_bytes())
    assert built == {"digest": compiled_modules.digest(), "problem": ""}


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert "no C compiler, or no headers of Python" in SETUP.missing_tool()
