"""One of several controllers: ``python -m serve.elected_controller --state DIR --address HOST:PORT [--ray]``.

Without ``--ray`` its replica hosts are processes of this machine.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import uvloop

from policy.config.deployment import Deployment
from policy.deployment_file.parse import parse
from policy.errors import NotLeader
from serve.actuator.fenced import Fence, machine_fence
from serve.actuator.gpu_cards import cards_of_machine
from serve.actuator.interface import Actuator, deployment_id
from serve.actuator.local import LocalActuator
from serve.controller.crash_loop_backoff import record_error, record_start
from serve.controller.leadership_lease import Leadership, LeaseStore
from serve.controller.serving import stop_signals
from serve.controller.standby_controller import ElectedController
from serve.ray_launcher import join
from store.database import Database
from store.election.database_lease import DatabaseLease
from store.election.database_state_dir import DatabaseStateDir, highest_term
from store.json_log_format import log_to
from store.kubernetes.lease import KubernetesLeaseStore
from store.state_dir import StateDir

log = logging.getLogger("tidegate.controller")


async def _run(state: StateDir, address: str, listen: str, *, ray: bool) -> None:
    # The supervisor waits between restarts.
    record_start(state, time.time())
    deployment = parse(state.load(state.deployment_path, dict[str, object]))
    cluster, election = deployment.cluster, deployment.cluster.election
    assert election is not None
    database = Database(state.database_url(deployment.store))
    # Ray is joined before it leads: a controller that cannot order anything is no candidate.
    fence: Fence | None = None
    if ray:
        actuator_of, ordered = _ray(state, deployment)
    else:
        fence = machine_fence(state.secret())
        actuator_of, ordered = _local(deployment), fence.highest()
    lease: LeaseStore = DatabaseLease(database)
    if election.kubernetes is not None:
        lease = KubernetesLeaseStore(election.kubernetes)
    # Replicas that run may have had orders of higher terms than a new database knows.
    above = max(highest_term(database), ordered)
    leadership = Leadership(lease, address, election.lease_s, above, wall=time.time, monotonic=time.monotonic)
    controller = ElectedController(
        leadership,
        state_of=lambda term: DatabaseStateDir(state.root, database, term),
        actuator_of=actuator_of,
        fence=fence,
        secret=state.secret(),
        address=address,
        listen=listen,
        # Pods that others started stay.
        addresses=cluster.controller if deployment.deploys else "",
    )
    try:
        await controller.run(stop_signals())
    finally:
        database.close()


def _local(deployment: Deployment) -> Callable[[DatabaseStateDir], Actuator]:
    cluster = deployment.cluster
    return lambda state: LocalActuator(state, cluster, cards_of_machine(cluster, os.environ))


def _ray(state: StateDir, deployment: Deployment) -> tuple[Callable[[DatabaseStateDir], Actuator], int]:
    """The maker of the actuator, and the highest term that has given orders to the cluster."""
    dashboard, token = join(deployment, state)
    from serve.actuator import ray_term_fence  # noqa: PLC0415  # imports Ray

    def actuator_of(leading: DatabaseStateDir) -> Actuator:
        return ray_term_fence.RayOrders(
            ray_term_fence.Term(
                number=leading.term, root=str(state.root), secret=state.secret(),
                cluster=deployment.cluster, dashboard=dashboard, token=token,
            )
        )  # fmt: skip

    return actuator_of, ray_term_fence.highest_term(deployment_id(state))


def main() -> None:
    """Run until SIGTERM, or until this controller is deposed. Replicas go on while another one answers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--listen", help="Default: the address.")
    parser.add_argument("--ray", action="store_true")
    given = parser.parse_args()
    log_to(logging.StreamHandler())
    state = StateDir(given.state)
    try:
        uvloop.run(_run(state, given.address, given.listen or given.address, ray=given.ray))
    except NotLeader as error:
        # Its supervisor starts it again, as a stand-by.
        log.warning("this controller ends: %s", error)
    except Exception as error:
        record_error(state, error)
        raise


if __name__ == "__main__":
    main()
