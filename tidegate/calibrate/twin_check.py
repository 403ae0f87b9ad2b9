"""A recorded replay of live replicas beside the twin's, on the same arrivals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from policy.config.deployment import Deployment
from policy.errors import ConfigError
from policy.scaling.view import Policy
from sim.arrival import Arrival
from sim.calibration.quantiles import Compared, compare
from sim.twin.record import Outcome
from sim.twin.run import simulate
from sim.workload.traces.reader import Lines, Objects
from tidegate.replay.results import ReplayRow


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies in seconds of requests that were served, in no order, by measure."""

    served: int
    seconds: dict[str, list[float]]


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """What was compared, and with what it was fed: latencies ``live`` and in the ``twin``."""

    compared: Compared
    live: Measured
    twin: Measured


def recorded_run(path: Path) -> list[ReplayRow]:
    """The requests of a replay in the order in which they were sent.

    Raises :class:`policy.errors.TraceError` for a line that is no request, and
    :class:`policy.errors.ConfigError` where there is none that was served.
    """
    rows = list(Objects(Lines(path), ReplayRow))
    if not any(row.served for row in rows):
        raise ConfigError(str(path), f"{len(rows)} requests", "a replay in which at least one was served")
    return sorted(rows, key=lambda row: row.at)


def calibrated_model(deployment: Deployment, model: str, profile: Mapping[str, object]) -> Deployment:
    """The deployment of ``model`` alone, timed by the content of a calibrated model's file."""
    spec = msgspec.structs.replace(deployment.model(model), profile=dict(profile))
    return msgspec.structs.replace(deployment, models=(spec,))


def check(
    deployment: Deployment,
    policies: Mapping[str, Policy],
    rows: Sequence[ReplayRow],
    path_s: float,
    progress: Callable[[float], None],
) -> Check:
    """Replay ``rows`` in the twin of the only model of ``deployment``.

    To the twin's latencies the way of ``path_s`` seconds is added that it knows nothing of: from a client to
    the engine and back. ``progress`` is told how far it has come, in seconds.
    """
    model = deployment.models[0].name
    start = rows[0].at
    trace = [
        Arrival(
            at=row.at - start,
            input_tokens=max(row.input_tokens, 1),
            output_tokens=max(row.output_tokens, 1),
            adapter=row.adapter,
            blocks=row.blocks,
        )
        for row in rows
    ]
    requests = simulate(deployment, policies, trace, progress=progress).requests[model]
    served = requests.outcome == Outcome.SERVED
    twin = Measured(
        served=int(served.sum()),
        seconds={
            "ttft": (requests.ttft_s[served] + path_s).tolist(),
            "itl": requests.itl_s[served].tolist(),
            "e2e": (requests.e2e_s[served] + path_s).tolist(),
        },
    )
    answered = [row for row in rows if row.served]
    live = Measured(
        served=len(answered),
        seconds={
            "ttft": [row.ttft_s for row in answered if row.ttft_s is not None],
            "itl": [row.itl_s for row in answered if row.itl_s is not None],
            "e2e": [row.e2e_s for row in answered if row.e2e_s is not None],
        },
    )
    compared = Compared(live=live.served, twin=twin.served, quantiles=compare(live.seconds, twin.seconds))
    return Check(compared=compared, live=live, twin=twin)
