"""The simulated deployment as it ships, on a Ray of its own: quick to be ready, gone when it is told."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
import yaml

from tests.e2e.first_question import ask
from tests.e2e.stack import ROOT, Stack
from tidegate.supervisor.preflight import foreign_ray

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

# What `tidegate up deployments/sim.yaml` may take under Ray: 14 s on two idle cores, more on busy ones.
READY_S = 120.0


def test_up_under_ray_is_ready_in_time_and_down_leaves_nothing(tmp_path: Path) -> None:
    if other := foreign_ray(()):
        pytest.skip(other)
    stack = Stack(tmp_path, yaml.safe_load((ROOT / "deployments" / "sim.yaml").read_text()))
    try:
        began = time.monotonic()
        stack.up()
        took_s = time.monotonic() - began
        assert [replica.state for replica in stack.replicas("sim")] == ["ready"]
        assert ask(stack.said, tmp_path)
    finally:
        stack.down()
    assert took_s <= READY_S, f"up took {took_s:.1f} s"
    assert foreign_ray(()) is None
    cluster = stack.document["cluster"]
    for port in (cluster["gcs_port"], cluster["dashboard_port"], int(cluster["controller"].split(":")[1])):
        socket.create_server(("127.0.0.1", port)).close()
