"""``tidegate doctor`` on a cluster of two nodes measures the network between them."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from tests.ports import free_ports
from tests.ray_nodes import HEAD, NODE, two_nodes
from tidegate.cli import group

pytestmark = [pytest.mark.ray, pytest.mark.long]

MODEL = {
    "name": "m", "engine": "sim", "shapes": {"small": {"cpus": 1}},
    "modes": {"multi-replica": {"shape": "small", "replicas": {"min": 1, "max": 2}}},
}  # fmt: skip


def test_each_node_sends_to_the_next(tmp_path: Path) -> None:
    file = tmp_path / "deployment.yaml"
    with two_nodes() as address:
        cluster = {"address": address, "controller": f"{HEAD}:{free_ports(1)[0]}"}
        file.write_bytes(msgspec.json.encode({"models": [MODEL], "cluster": cluster}))
        words = ["--state-dir", str(tmp_path / "state"), "doctor", str(file), "--json"]
        shown = CliRunner().invoke(group, words)
    (found,) = [
        each for each in json.loads(shown.output)["findings"] if each["check"] == "network between nodes"
    ]
    assert found["level"] in ("ok", "warning"), found
    for one, other in ((HEAD, NODE), (NODE, HEAD)):
        assert f"{one} to {other}" in found["found"]
