"""A controller and its HTTP API: without Ray as ``python -m serve.controller.process --state DIR``."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
import uvloop

from policy.deployment_file.parse import parse
from serve.actuator.by_engine import ActuatorByEngine
from serve.actuator.gpu_cards import cards_of_machine
from serve.actuator.interface import Actuator
from serve.actuator.kubernetes import KubernetesActuator
from serve.actuator.local import LocalActuator
from serve.controller.controller import Controller
from serve.controller.routes import build_app
from serve.controller.run_record import record_error, record_start
from serve.http import HttpServer
from store.log_lines import log_to
from store.state_dir import StateDir, listen

if TYPE_CHECKING:
    from serve.adapters.adapter_store import AdapterStore  # imports the database, which takes long


async def serve_controller(actuator: Actuator, state: StateDir, address: str) -> None:
    """Serve at ``address`` (``HOST:PORT``) until cancelled or until either part fails.

    The port is fixed, so a predecessor that is just ending is waited for.
    """
    open_adapters = partial(_open_adapters, state)
    models = parse(state.load(state.deployment_path, dict[str, object])).models
    workloads = KubernetesActuator(state, models)
    controller = Controller(
        ActuatorByEngine(actuator, workloads),
        state,
        os.getpid(),
        open_adapters,
        wall=time.time,
        monotonic=time.monotonic,
    )
    host, _, port = address.rpartition(":")
    for attempt in range(50):
        try:
            sock = listen(host, int(port))
            break
        except OSError:
            if attempt == 49:
                raise
            await asyncio.sleep(0.2)
    config = uvicorn.Config(
        build_app(controller, state.secret()), http="httptools", access_log=False, log_level="warning",
        log_config=None, lifespan="off", timeout_graceful_shutdown=1,
    )  # fmt: skip
    tasks = {
        asyncio.create_task(HttpServer(config).serve(sockets=[sock])),
        asyncio.create_task(controller.run()),
        asyncio.create_task(controller.audit.run()),
        asyncio.create_task(workloads.report(controller.beat)),
    }
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await workloads.close()
        sock.close()


def _open_adapters(state: StateDir) -> AdapterStore:
    from serve.adapters.adapter_store import AdapterStore  # noqa: PLC0415 - its database takes long to import

    deployment = parse(state.load(state.deployment_path, dict[str, object]))
    return AdapterStore(state, state.database_url(deployment.store))


async def _run(state: StateDir) -> None:
    # The supervisor waits between restarts.
    record_start(state, time.time())
    deployment = parse(state.load(state.deployment_path, dict[str, object]))
    actuator = LocalActuator(state, deployment.cluster, cards_of_machine(deployment.cluster, os.environ))
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
    log_to(logging.StreamHandler())
    state = StateDir(given.state)
    try:
        uvloop.run(_run(state))
    except Exception as error:
        record_error(state, error)
        raise


if __name__ == "__main__":
    main()
