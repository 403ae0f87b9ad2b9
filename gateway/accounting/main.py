"""The accounting process: the only one of a host that opens the database for keys, limits and the ledger.

``python -m gateway.accounting.main --state DIR``; a child of the supervisor, like a gateway worker. Workers
serve on without it: they know the keys and limits as it wrote them last, and keep a journal of usage.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
from collections.abc import Iterator
from pathlib import Path

import uvicorn
import uvloop

from gateway.accounting.app import build_app
from gateway.accounting.database_access import DatabaseAccess
from gateway.accounting.periodic_tasks import PeriodicTasks
from policy.deployment_file.parse import parse
from store.log_lines import log_to
from store.state_dir import StateDir, listen_at

log = logging.getLogger("tidegate.accounting")


class _Server(uvicorn.Server):
    """Leaves signals to the process around it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def account(state: StateDir) -> None:
    """Serve until SIGTERM or SIGINT."""

    def url() -> str:
        deployment = parse(state.load(state.deployment_path, dict[str, object]))
        return state.database_url(deployment.store)

    database = DatabaseAccess(url)
    config = uvicorn.Config(
        build_app(database), http="httptools", ws="none", lifespan="off", server_header=False,
        access_log=False, log_level="warning", log_config=None, timeout_graceful_shutdown=5,
    )  # fmt: skip
    server = _Server(config)
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    periodic = PeriodicTasks(stopping.set)
    periodic.start("database", 1.0, database.get)
    serving = asyncio.create_task(server.serve(sockets=[listen_at(state.accounting_socket_path)]))
    log.info("accounting_started")
    await stopping.wait()
    server.should_exit = True
    await serving
    await periodic.close()
    database.close()
    if periodic.failure is not None:
        raise periodic.failure
    log.info("accounting_stopped")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m gateway.accounting.main", description=__doc__)
    parser.add_argument("--state", type=Path, required=True, help="the state directory")
    given = parser.parse_args()
    log_to(logging.StreamHandler())
    uvloop.run(account(StateDir(given.state)))


if __name__ == "__main__":
    main()
