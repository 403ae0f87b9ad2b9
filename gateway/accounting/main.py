"""The accounting process: the only one of a host that opens the database for keys, limits and the ledger.

``python -m gateway.accounting.main --state DIR``; a child of the supervisor, like a gateway worker. Workers
serve on without it: they know the keys and limits as it wrote them last, and keep a journal of usage.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import uvicorn
import uvloop

from gateway.accounting.access_snapshot_writer import AccessSnapshotWriter
from gateway.accounting.access_transaction import AccessDatabase
from gateway.accounting.app import build_app, route
from gateway.accounting.budgets import Budgets, SpentBudgets
from gateway.accounting.database_access import DatabaseAccess
from gateway.accounting.deployment_file_snapshot import DeploymentFileReader
from gateway.accounting.energy_shares import EVERY_S as ENERGY_EVERY_S
from gateway.accounting.energy_shares import EnergyShares
from gateway.accounting.ledger_reports import LedgerMetrics
from gateway.accounting.ledger_writer import LedgerWriter
from gateway.accounting.limit_shares import LOOK_EVERY_S as LEASES_EVERY_S
from gateway.accounting.limit_shares import LimitLeaseKeeper
from gateway.accounting.periodic_runner import PeriodicTasks
from gateway.intake.shared_limits import ACCOUNTING, SharedLimits
from policy.errors import TidegateError
from policy.wire.accounting_api import LEDGER
from store.event_loop.uvicorn_server import UvicornServer
from store.json_log_format import log_to
from store.os_process import allow_connections
from store.state_dir import StateDir, listen_at
from store.tenancy import audit_spool

log = logging.getLogger("tidegate.accounting")

METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
DRAIN_EVERY_S = 0.5
# For changes that other hosts made.
LOOK_EVERY_S = 0.3


async def account(state: StateDir) -> None:
    """Serve until SIGTERM or SIGINT."""

    declared = DeploymentFileReader(state)
    database = DatabaseAccess(lambda: declared.get().database)
    access = AccessDatabase(database, declared, time.time)
    limits = SharedLimits(state.limits_path, ACCOUNTING)
    snapshot = AccessSnapshotWriter(access, state, limits.access_in_force)
    access.prepare = snapshot.prepare
    energy = EnergyShares(lambda: declared.get().controller, state.secret(), database.get)
    budgets = Budgets(access)
    writer = LedgerWriter(
        database.get, state.usage_path, state.host_id(), budgets=budgets.of, added=energy.added
    )
    spent = SpentBudgets(budgets, limits, database.get)
    keeper = LimitLeaseKeeper(database.get, limits, state.host_id())

    def write_ledger() -> None:
        budgets.update()
        spent.look()
        writer.drain()
        spent.publish()

    # A status is asked for when the database hangs, and needs none.
    ledger = route("GET", LEDGER, lambda _request, _body: writer.status(), ThreadPoolExecutor(1, "status"))
    config = uvicorn.Config(
        build_app(access, [ledger]),
        http="httptools", ws="none", lifespan="off", server_header=False,
        access_log=False, log_level="warning", log_config=None, timeout_graceful_shutdown=5,
    )  # fmt: skip
    server = UvicornServer(config)
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    periodic = PeriodicTasks(stopping.set)
    periodic.start("access_file", LOOK_EVERY_S, snapshot.update)
    periodic.start("leases", LEASES_EVERY_S, keeper.turn)
    periodic.start("audit", 1.0, partial(audit_spool.drain, state, access.add_audit))
    periodic.start("ledger", DRAIN_EVERY_S, write_ledger)
    periodic.start("energy", ENERGY_EVERY_S, energy.ask)
    if directory := os.environ.get(METRICS_VARIABLE):
        periodic.start("ledger_metrics", 1.0, LedgerMetrics(Path(directory), writer.status).publish)
    serving = asyncio.create_task(server.serve(sockets=[listen_at(state.accounting_socket_path)]))
    log.info("accounting_started")
    await stopping.wait()
    server.should_exit = True
    await serving
    await periodic.close()
    with contextlib.suppress(TidegateError, OSError):  # the workers' last requests; else the next process's
        await asyncio.to_thread(write_ledger)
    writer.close()
    await asyncio.to_thread(keeper.close)
    database.close()
    if periodic.failure is not None:
        raise periodic.failure
    log.info("accounting_stopped")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m gateway.accounting.main", description=__doc__)
    parser.add_argument("--state", type=Path, required=True, help="the state directory")
    given = parser.parse_args()
    log_to(logging.StreamHandler())
    allow_connections()
    uvloop.run(account(StateDir(given.state)))


if __name__ == "__main__":
    main()
