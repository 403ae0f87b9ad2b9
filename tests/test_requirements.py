"""The lock files: pinned, agreeing with each other and with pyproject.toml, and free of hosts."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
SETS = ("cpu", "gpu", "loadtest", "dev")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# The CPU and the GPU build of vLLM each want their own.
BY_HARDWARE = {"torch", "setuptools", "apache-tvm-ffi"}


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    found = [line.split("==") for line in lines if not line.startswith("#")]
    return {str(canonicalize_name(package)): version for package, version in found}


@pytest.mark.parametrize("name", SETS)
def test_every_line_is_one_exact_version(name: str) -> None:
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert lines == sorted(lines, key=str.lower)
    for line in lines:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+]+", line), line
    assert f"pip install --no-deps -r requirements/{name}.txt" in text


@pytest.mark.parametrize(("first", "second"), [("cpu", "gpu"), ("cpu", "loadtest"), ("gpu", "loadtest")])
def test_two_sets_that_may_meet_agree(first: str, second: str) -> None:
    one, other = pins(first), pins(second)
    differ = {name for name in one.keys() & other.keys() if one[name] != other[name]}
    assert differ <= BY_HARDWARE


def test_the_development_set_repeats_nothing() -> None:
    assert not pins("dev").keys() & (pins("cpu").keys() | pins("loadtest").keys())


@pytest.mark.parametrize("name", SETS)
def test_what_the_project_asks_for_is_locked(name: str) -> None:
    have = pins(name)
    wanted = list(PROJECT["optional-dependencies"][name])
    if name in ("cpu", "gpu"):
        wanted += PROJECT["dependencies"]
    if name == "dev":
        have = pins("cpu") | pins("loadtest") | have
    for each in map(Requirement, wanted):
        version = have.get(str(canonicalize_name(each.name)))
        assert version is not None, each.name
        assert each.specifier.contains(version), f"{each} has {version}"


def test_the_cpu_set_leaves_out_what_breaks_it() -> None:
    have = pins("cpu")
    assert have["torch"].endswith("+cpu")
    assert not {"torchvision", "torchaudio", "torchcodec", "triton"} & have.keys()


@pytest.mark.slow
def test_what_is_installed_needs_nothing_that_is_not_locked() -> None:
    """They are installed without their dependencies, so the sets must be complete by themselves."""
    have = {name for each in SETS for name in pins(each)}
    missing = set()
    for name in have:
        try:
            needed = map(Requirement, metadata.requires(name) or ())
        except metadata.PackageNotFoundError:  # of the other hardware
            continue
        plain = (each for each in needed if each.marker is None or each.marker.evaluate({"extra": ""}))
        missing |= {each.name for each in plain if canonicalize_name(each.name) not in have}
    assert missing == set()


def test_every_direct_dependency_has_its_reason() -> None:
    text = (ROOT / "docs" / "dependencies.md").read_text()
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    for each in {Requirement(line).name for group in groups for line in group}:
        assert re.search(rf"^- `{re.escape(each)}`", text, re.MULTILINE), each
