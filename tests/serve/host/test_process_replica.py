"""A replica host as a process: it ends by itself when nobody can know that it is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from serve.host.gpu_group_host import HostProcessSpec
from tests.serve.hosts import WITHIN_S, host_spec
from tests.serve.sim_documents import deployment, sim_model


@pytest.mark.process
def test_a_host_whose_heartbeats_fail_ends(tmp_path: Path) -> None:
    spec = host_spec(deployment(sim_model()).models[0], tmp_path)
    # No such address: any other fault of the sender has the same effect.
    spec = msgspec.structs.replace(spec, controller="127.0.0.1:port")
    argv = [sys.executable, "-m", "serve.host.process_replica", "r"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(HostProcessSpec(spec=spec, replica="r")) + b"\n")
        process.stdin.close()
        try:
            assert process.wait(WITHIN_S) == 1
        finally:
            process.kill()
