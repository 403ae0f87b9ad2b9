"""The controller as a process of its own, without Ray: ``python -m serve.controller.process --state DIR``."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import time
from pathlib import Path

import uvloop

from policy.deployment_file.parse import parse
from serve.actuator.gpu_cards import cards_of_machine
from serve.actuator.local import LocalActuator
from serve.controller.crash_loop_backoff import record_error, record_start
from serve.controller.serving import serve_controller, stop_signals
from store.json_log_format import log_to
from store.state_dir import StateDir


async def _run(state: StateDir) -> None:
    # The supervisor waits between restarts.
    record_start(state, time.time())
    deployment = parse(state.load(state.deployment_path, dict[str, object]))
    actuator = LocalActuator(state, deployment.cluster, cards_of_machine(deployment.cluster, os.environ))
    serving = asyncio.create_task(serve_controller(actuator, state, deployment.cluster.controller))
    stopped = asyncio.create_task(stop_signals().wait())
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
    log_to(logging.StreamHandler())
    state = StateDir(given.state)
    try:
        uvloop.run(_run(state))
    except Exception as error:
        record_error(state, error)
        raise


if __name__ == "__main__":
    main()
