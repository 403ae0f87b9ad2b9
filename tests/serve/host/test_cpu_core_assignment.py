"""Cores: replicas of one mode do not overlap, and an ended process holds none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest
from msgspec.structs import replace

from serve.host import cpu_core_assignment
from serve.host.cpu_core_assignment import CoreSet

ALL = (0, 1, 2, 3)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cores.json"


def kept(path: Path) -> list[CoreSet]:
    return msgspec.json.decode(path.read_bytes(), type=list[CoreSet])


def test_the_least_claimed_cores_come_first(path: Path) -> None:
    assert cpu_core_assignment.claim_cores(path, 2, ALL) == (0, 1)
    assert cpu_core_assignment.claim_cores(path, 1, ALL) == (2,)
    assert cpu_core_assignment.claim_cores(path, 2, ALL) == (0, 3)


def test_a_second_shape_shares_cores_when_all_are_claimed(path: Path) -> None:
    assert cpu_core_assignment.claim_cores(path, 4, ALL) == ALL
    assert cpu_core_assignment.claim_cores(path, 2, ALL) == (0, 1)
    assert cpu_core_assignment.claim_cores(path, 2, ALL) == (2, 3)


def test_a_claim_of_too_many_cores_gets_all(path: Path) -> None:
    assert cpu_core_assignment.claim_cores(path, 9, ALL) == ALL


@pytest.mark.slow
def test_claims_of_ended_processes_are_dropped(path: Path) -> None:
    code = "import sys; from pathlib import Path; from serve.host.cpu_core_assignment import claim_cores\n"
    code += "print(claim_cores(Path(sys.argv[1]), 2, (0, 1)))"
    command = [sys.executable, "-c", code, str(path)]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    assert ended.stdout.strip() == "(0, 1)"
    assert len(kept(path)) == 1
    assert cpu_core_assignment.claim_cores(path, 2, ALL) == (0, 1)
    assert len(kept(path)) == 1


def test_a_recycled_process_id_does_not_inherit_claims(path: Path) -> None:
    process = psutil.Process()
    earlier = CoreSet(pid=process.pid, created=process.create_time() - 100, cores=(0, 1))
    path.write_bytes(msgspec.json.encode([earlier]))
    assert cpu_core_assignment.claim_cores(path, 2, ALL) == (0, 1)
    assert [claim.cores for claim in kept(path)] == [(0, 1)]


@pytest.mark.parametrize("shifted_s", [1.5, 100.0])
def test_claims_outlast_a_clock_that_is_set(path: Path, shifted_s: float) -> None:
    assert cpu_core_assignment.claim_cores(path, 2, ALL) == (0, 1)
    (claim,) = kept(path)
    # A claim of an earlier version has no key.
    key = claim.start_key if shifted_s > 2 else ""
    moved = replace(claim, created=claim.created - shifted_s, start_key=key)
    path.write_bytes(msgspec.json.encode([moved]))
    assert cpu_core_assignment.claim_cores(path, 2, ALL) == (2, 3)
    assert [each.start_key for each in kept(path)] == [claim.start_key] * 2


def test_only_cores_of_the_process_affinity_are_claimed(path: Path) -> None:
    usable = set(psutil.Process().cpu_affinity())
    assert set(cpu_core_assignment.claim_cores(path, 1)) <= usable
