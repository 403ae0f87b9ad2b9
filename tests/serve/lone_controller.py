"""A controller process over replicas in memory: ``python -m tests.serve.lone_controller STATE``."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from policy.types import Replica
from serve.controller.serving import serve_controller
from store.state_dir import StateDir
from tests.serve.memory_actuator import MemoryActuator, MemoryCluster


def silent(replica: Replica) -> None:
    """Its replicas send no heartbeats."""


def main() -> None:
    """Serve until killed."""
    state = StateDir(Path(sys.argv[1]))
    document = state.load(state.deployment_path, dict[str, Any])
    assert document is not None
    actuator = MemoryActuator(MemoryCluster(silent))
    asyncio.run(serve_controller(actuator, state, document["cluster"]["controller"]))


if __name__ == "__main__":
    main()
