"""Nodes that have another Tidegate, Python or engine than the head are refused, and both are named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from policy.errors import EngineFailed
from serve.host.version_check import NodeVersions, refuse_other
from tests.serve.hosts import host_spec
from tests.serve.sim_documents import deployment

HEAD = NodeVersions(tidegate="1.2", python="3.11", vllm="0.32.0")


@pytest.mark.parametrize("change", [{"tidegate": "1.3"}, {"python": "3.12"}, {"vllm": "0.31.0"}])
def test_a_node_with_other_versions_is_refused(change: dict[str, str]) -> None:
    node = msgspec.structs.replace(HEAD, **change)
    with pytest.raises(EngineFailed) as refused:
        refuse_other(HEAD, node)
    assert str(refused.value) == f"this node has {node}; the head has {HEAD}: install the same on both"
    assert next(iter(change.values())) in str(refused.value)


@pytest.mark.parametrize("change", [{}, {"vllm": ""}])
def test_a_node_with_the_heads_versions_is_accepted(change: dict[str, str]) -> None:
    refuse_other(HEAD, msgspec.structs.replace(HEAD, **change))
    refuse_other(msgspec.structs.replace(HEAD, **change), HEAD)


@pytest.mark.slow
def test_a_ray_host_checks_versions_before_it_decodes_the_rest(tmp_path: Path) -> None:
    # Another version may have other fields: only the versions are decoded first.
    spec = msgspec.to_builtins(host_spec(deployment().models[0], tmp_path))
    spec["versions"]["tidegate"] = "9.9"
    changed = spec | {"model": "of another form"}
    # In its own process: tests that join a cluster import Ray later.
    code = f"from serve.host.ray_replica import RayHost; RayHost({msgspec.json.encode(changed)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "EngineFailed: this node has Tidegate" in done.stderr
    assert "the head has Tidegate 9.9" in done.stderr
