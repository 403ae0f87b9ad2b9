"""Compare a recorded replay of live replicas with the simulator, on the same arrivals."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from policy.config.deployment import Deployment
from policy.errors import ConfigError
from policy.scaling.view import Policy
from sim.arrivals import Arrival
from sim.calibration.quantiles import LatencyComparison, compare
from sim.simulator.run import simulate
from sim.simulator.run_record import RequestOutcome
from sim.workload.traces.record_readers import JsonLinesReader, LineReader
from tidegate.replay.results import ReplayRow


class SimulatorCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison, and the latencies of the served requests in seconds, by measure, on both sides."""

    compared: LatencyComparison
    live: dict[str, list[float]]
    simulated: dict[str, list[float]]


class RecordedRun(msgspec.Struct, frozen=True):
    """A replay's requests of one model, by the time of sending; ``left_out`` were of other models."""

    rows: Sequence[ReplayRow]
    left_out: int = 0


def recorded_run(path: Path, others: Collection[str] = ()) -> RecordedRun:
    """The requests of a replay but those of the models ``others``.

    Raises ``TraceError`` or ``ConfigError`` if it is invalid.
    """
    every = list(JsonLinesReader(LineReader(path), ReplayRow))
    rows = [row for row in every if row.model not in others]
    if not any(row.served for row in rows):
        raise ConfigError(str(path), f"{len(rows)} requests", "a replay in which at least one was served")
    return RecordedRun(sorted(rows, key=lambda row: row.at), len(every) - len(rows))


def calibrated_model(deployment: Deployment, model: str, profile: Mapping[str, object]) -> Deployment:
    """The deployment of ``model`` alone, with a calibrated performance model as its ``profile``."""
    spec = msgspec.structs.replace(deployment.model(model), profile=dict(profile))
    return msgspec.structs.replace(deployment, models=(spec,))


def check(
    deployment: Deployment,
    policies: Mapping[str, Policy],
    run: RecordedRun,
    path_s: float,
    progress: Callable[[float], None],
) -> SimulatorCheck:
    """Simulate ``run`` on the only model of ``deployment``.

    Those that failed live are load in the simulator, and compared with nothing. ``path_s``, the network time
    from a client to the engine and back, is added to the simulated latencies. ``progress`` receives the
    simulated seconds.
    """
    model, rows = deployment.models[0].name, run.rows
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
    answered = [row for row in rows if row.served]
    served = (requests.outcome == RequestOutcome.SERVED) & np.array([row.served for row in rows])
    simulated = {
        "ttft": (requests.ttft_s[served] + path_s).tolist(),
        "itl": requests.itl_s[served].tolist(),
        "e2e": (requests.e2e_s[served] + path_s).tolist(),
    }
    live = {
        measure: [value for row in answered if (value := getattr(row, f"{measure}_s")) is not None]
        for measure in simulated
    }
    compared = LatencyComparison(
        live=len(answered),
        simulated=int(served.sum()),
        failed=len(rows) - len(answered),
        left_out=run.left_out,
        quantiles=compare(live, simulated),
    )
    return SimulatorCheck(compared=compared, live=live, simulated=simulated)
