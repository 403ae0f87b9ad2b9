"""The checks of the machine and of the installation."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidegate.doctor import host
from tidegate.doctor.finding import Finding, Severity, by_importance, error, not_applicable, ok, warning

GIB = 1024**3
VERSIONS = {"ray": "2.60.1", "rich": "14.0"}


def test_the_worst_comes_first_and_checks_keep_their_order() -> None:
    given = [not_applicable("a", ""), ok("b", ""), warning("c", "", "x"), error("d", "", "x"), ok("e", "")]
    assert [each.check for each in by_importance([*given, error("f", "", "x")])] == list("dfcbea")


@pytest.mark.parametrize(("version", "level"), [("3.11.7", Severity.OK), ("3.10.2", Severity.ERROR)])
def test_python(version: str, level: Severity) -> None:
    assert host.python(version, ">=3.11,<3.13").level is level


@pytest.mark.parametrize(
    ("requirements", "level", "text"),
    [
        (["ray[serve]<2.61,>=2.60", "rich>=13"], Severity.OK, "rich 14.0"),
        (["ray>=2.61"], Severity.ERROR, "ray 2.60.1 (expected >=2.61)"),
        (["xxhash"], Severity.ERROR, "xxhash is missing (expected any version)"),
        (["vllm==0.32.0; extra == 'gpu'"], Severity.OK, "rich 14.0"),
    ],
)
def test_packages(requirements: list[str], level: Severity, text: str) -> None:
    found = host.packages(requirements, VERSIONS.get, ("rich", "torch"))
    assert (found.level, found.found) == (level, text)


@pytest.mark.parametrize(
    ("vllm", "wanted", "on_cpu", "flags", "level"),
    [
        ("0.32.0", True, True, {"avx2"}, Severity.OK),
        ("0.32.0", True, True, {"sse2"}, Severity.ERROR),
        ("0.32.0", True, False, {"sse2"}, Severity.OK),
        ("", True, False, {"avx2"}, Severity.ERROR),
        ("", False, False, {"avx2"}, Severity.NOT_APPLICABLE),
    ],
)
def test_engine(vllm: str, wanted: bool, on_cpu: bool, flags: set[str], level: Severity) -> None:
    assert host.engine(vllm, wanted=wanted, on_cpu=on_cpu, cpu_flags=frozenset(flags)).level is level


def test_memory_names_what_needs_it() -> None:
    needs = {"7 x 15.0 GiB for the weights of sleeping engines of llama": 105.0 * GIB}
    short = host.memory(64 * GIB, needs, ["other"])
    assert short.level is Severity.ERROR
    assert short.found == (
        "64.0 GiB available, 105.0 GiB needed: 7 x 15.0 GiB for the weights of sleeping engines of llama;"
        " not counted, as the weights are not here yet: other"
    )
    assert host.memory(128 * GIB, needs, []).level is Severity.OK


@pytest.mark.parametrize(
    ("free", "ray_bytes", "gpus_per_replica", "level"),
    [
        (GIB // 16, GIB // 8, 1, Severity.ERROR),
        (GIB // 16, 0, 1, Severity.OK),
        (GIB, GIB // 8, 4, Severity.WARNING),
        (4 * GIB, GIB // 8, 4, Severity.OK),
    ],
)
def test_shared_memory(free: int, ray_bytes: int, gpus_per_replica: int, level: Severity) -> None:
    found = host.shared_memory(8 * GIB, free, ray_bytes=ray_bytes, gpus_per_replica=gpus_per_replica)
    assert found.level is level


@pytest.mark.parametrize(
    ("free", "level"), [(GIB // 2, Severity.ERROR), (5 * GIB, Severity.WARNING), (50 * GIB, Severity.OK)]
)
def test_the_fullest_disk_counts(free: int, level: Severity) -> None:
    assert host.disk({"/a": 100 * GIB, "/b": free}).level is level


def test_one_path_of_each_file_system_is_shown(tmp_path: Path) -> None:
    found = host.free_disk([tmp_path / "not" / "there", tmp_path])
    assert list(found) == [str(tmp_path / "not" / "there")]
    assert found[str(tmp_path / "not" / "there")] > 0


@pytest.mark.parametrize(
    ("hard", "level", "text"),
    [
        (1_048_576, Severity.OK, "65,536"),
        (20_064, Severity.WARNING, "10,000 client"),
        (1024, Severity.ERROR, "480 client"),
    ],
)
def test_descriptors(hard: int, level: Severity, text: str) -> None:
    found: Finding = host.descriptors(hard)
    assert found.level is level
    assert text in found.found


def test_sources_cost_cpu_time() -> None:
    assert [host.compiled(problem).level for problem in ("", "none")] == [Severity.OK, Severity.WARNING]
