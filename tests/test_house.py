"""The rules of CONTRIBUTING for modules and folders: size, docstrings and names."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = [*PROJECT["tool"]["importlinter"]["root_packages"], "loadtests"]
MODULES = sorted(path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
KNOWN = set(MODULES)
MAX_LINES = 400
# A longer module's docstring has this, with the reason after it.
REASON = re.compile(rf"[Oo]ver {MAX_LINES} lines(: |, because) *\S")
MAX_MODULES = 15
# A package's docstring says more than its name.
MIN_WORDS = 4
MEANINGLESS = {"util", "utils", "common", "helper", "helpers", "manager", "managers", "misc"}


def faults(text: str) -> list[str]:
    """The rules that a module with this text breaks."""
    docstring = ast.get_docstring(ast.parse(text)) or ""
    first, *rest = docstring.splitlines() or [""]
    found = []
    if not first.endswith(".") or (rest and rest[0]):
        found.append("its docstring does not start with one line that is a sentence")
    if len(text.splitlines()) > MAX_LINES and not REASON.search(docstring):
        found.append(f"it has over {MAX_LINES} lines, and its docstring no 'over {MAX_LINES} lines: <why>'")
    return found


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_a_module_has_a_docstring_and_a_limited_size(module: Path) -> None:
    assert faults((ROOT / module).read_text()) == []


def test_no_name_is_meaningless() -> None:
    assert [str(module) for module in MODULES if MEANINGLESS & set(module.with_suffix("").parts)] == []


def test_a_folder_holds_a_limited_number_of_modules() -> None:
    counts = Counter(module.parent for module in MODULES if module.name != "__init__.py")
    assert {str(folder): count for folder, count in counts.items() if count > MAX_MODULES} == {}


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {module.parent for module in MODULES}
    assert [str(folder) for folder in sorted(folders) if folder / "__init__.py" not in MODULES] == []


@pytest.mark.parametrize("init", [module for module in MODULES if module.name == "__init__.py"], ids=str)
def test_a_package_says_what_it_is_and_what_to_read_first(init: Path) -> None:
    docstring = ast.get_docstring(ast.parse((ROOT / init).read_text())) or ""
    assert len(docstring.splitlines()[0].split()) >= MIN_WORDS
    for name in re.findall(r"Read first: `(\w+)`", docstring):
        folder = ROOT / init.parent
        assert (folder / f"{name}.py").exists() or (folder / name / "__init__.py").exists(), name


def imported(module: Path) -> set[Path]:
    """The modules of this project that ``module`` imports, also for the type checker alone."""
    names: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / module).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {path for name in names if (path := Path(*name.split(".")).with_suffix(".py")) in KNOWN}


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Not for types either, which import-linter leaves out."""
    TopologicalSorter({module: imported(module) for module in MODULES}).prepare()
