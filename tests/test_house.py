"""Every module of the packages says what it is for, stays short, and has a name that means something."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = [*PROJECT["tool"]["importlinter"]["root_packages"], "loadtests"]
MODULES = sorted(path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
MAX_LINES = 300
# What a longer module's docstring says, with the reason after it.
REASON = "over 300 lines: "
MEANINGLESS = {"util", "utils", "common", "helper", "helpers", "manager", "managers", "misc"}


def faults(text: str) -> list[str]:
    """What is wrong with a module of this text."""
    docstring = ast.get_docstring(ast.parse(text)) or ""
    first, *rest = docstring.splitlines() or [""]
    found = []
    if not first.endswith(".") or (rest and rest[0]):
        found.append("its docstring does not start with one line that is a sentence")
    if len(text.splitlines()) > MAX_LINES and REASON not in docstring:
        found.append(f"it has over {MAX_LINES} lines, and its docstring no '{REASON}<why>'")
    return found


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_a_module_says_what_it_is_for_and_is_short(module: Path) -> None:
    assert faults((ROOT / module).read_text()) == []


def test_no_name_means_nothing() -> None:
    assert [str(module) for module in MODULES if MEANINGLESS & set(module.with_suffix("").parts)] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_is_looked_at(package: str) -> None:
    assert any(module.parts[0] == package for module in MODULES)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 1),
        ("x = 1", 1),
        ('"""No sentence"""', 1),
        ('"""A first line\nthat goes on."""', 1),
        ('"""Good."""', 0),
        ('"""Good.\n\nMore of it.\n"""', 0),
        ('"""Good."""\n' + "x = 1\n" * MAX_LINES, 1),
        (f'"""Good.\n\nOne module though {REASON}it is a table.\n"""\n' + "x = 1\n" * MAX_LINES, 0),
    ],
)
def test_the_rules_find_what_they_are_for(text: str, count: int) -> None:
    assert len(faults(text)) == count
