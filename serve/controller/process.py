"""A controller without Ray: ``python -m serve.controller.process --state DIR``."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
from pathlib import Path

import uvloop

from policy.deployment_file.parse import parse
from serve.actuator.local import LocalActuator
from serve.controller.server import serve_controller
from store.state_dir import StateDir


async def _run(state: StateDir) -> None:
    deployment = parse(state.load(state.deployment_path, dict[str, object]))
    actuator = LocalActuator(state, deployment.cluster.controller)
    serving = asyncio.create_task(serve_controller(actuator, state, deployment.cluster.controller))
    stopping = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stopping.set)
    stopped = asyncio.create_task(stopping.wait())
    await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        serving.result()
    serving.cancel()
    await asyncio.wait({serving})
    await actuator.stop()
    await actuator.close()


def main() -> None:
    """Run the controller until SIGTERM, which ends its replicas."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", type=Path, required=True)
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    uvloop.run(_run(StateDir(given.state)))


if __name__ == "__main__":
    main()
