"""Compiled policy modules: found by the digest of their sources, and tested as the sources are."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from store import mypyc_cache

ROOT = Path(__file__).parents[2]
RUN = """
import sys
from store import mypyc_cache
assert mypyc_cache.use()
import policy.routing.router as router
assert router.__file__.endswith(".so"), router.__file__
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-m", "not (slow or process)", *sys.argv[1:]]))
"""


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *argv], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_compiled_modules_make_the_decisions_of_the_sources() -> None:
    built = run("-m", "store.mypyc_cache")
    assert built.returncode == 0, built.stderr
    tested = run("-c", RUN, *(f"tests/policy/{folder}" for folder in ("admission", "routing", "stats")))
    assert tested.returncode == 0, tested.stdout[-4000:]


def test_every_compiled_module_exists() -> None:
    paths = [
        ROOT / package / f"{name}.py" for package, names in mypyc_cache.MODULES.items() for name in names
    ]
    assert [path for path in paths if not path.is_file()] == []


def test_no_structure_of_another_library_is_compiled() -> None:
    found = []
    for package, names in mypyc_cache.MODULES.items():
        for name in names:
            for node in ast.walk(ast.parse((ROOT / package / f"{name}.py").read_text())):
                if isinstance(node, ast.ClassDef):
                    bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
                    found += [f"{package}.{name}.{node.name}"] if {"Struct", "Structure"} & set(bases) else []
    assert found == []


def test_an_edited_source_replaces_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "policy").mkdir()
    source = tmp_path / "policy" / "routing.py"
    source.write_text("a = 1")
    monkeypatch.setattr(mypyc_cache, "ROOT", tmp_path)
    before = mypyc_cache.digest()
    source.write_text("a = 2")
    assert mypyc_cache.digest() != before


@pytest.mark.slow
def test_a_failed_compilation_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package, names in mypyc_cache.MODULES.items():
        for name in names:
            module = tmp_path / package / f"{name}.py"
            module.parent.mkdir(parents=True, exist_ok=True)
            module.write_text("x: int = 'no number'\n")
    for package in mypyc_cache._READ:
        (tmp_path / package).mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(mypyc_cache, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    with pytest.raises(SystemExit, match="uncompiled, slower: mypyc"):
        mypyc_cache.main()
    assert mypyc_cache.use() is False
