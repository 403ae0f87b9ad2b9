"""The setup of the benchmark: one half of a trace, and a model whose plan has about ten replicas."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from policy.config.deployment import Deployment
from policy.deployment_file.parse import parse
from policy.engine.builtin_profiles import shipped
from sim.arrivals import Arrival
from sim.oracle.least_work import least_problem, least_work, tokens_of
from sim.oracle.linear_program import lower_bound
from sim.oracle.provisioning_problem import ProvisioningProblem, bin_arrivals
from sim.results.evaluation_metrics import RunInterval
from sim.workload.traces.detect_format import open_trace
from sim.workload.transforms import resample, slice_trace

MODEL = "contest"
MODE, SHAPE = "multi-replica", "one"
# High enough never to limit a policy.
MOST = 40
# The warm-up with empty engines, which is not judged.
WARM_S = 300.0
WARM_PART = 0.25
# Requests of the Azure trace are answered in about as long.
BIN_S = 10.0
# A trace with a higher mean of prompt tokens has long prompts.
LONG_TOKENS = 4000


class TraceHalf(StrEnum):
    """Policies are tuned on one half of a trace and judged on the other."""

    TUNING = "tuning"
    TEST = "test"


@dataclass(frozen=True, slots=True)
class PolicyBenchmarkSetup:
    """The ``half`` of ``trace``, which lasts ``lasts_s`` in all, served by single-GPU replicas.

    ``profile`` is their engine, which takes requests up to ``longest`` tokens; the SLO is in seconds.
    """

    trace: Path
    half: TraceHalf
    lasts_s: float
    longest: int
    profile: str
    ttft_p95_s: float
    itl_p95_s: float
    attainment: float = 0.99

    @property
    def stretch(self) -> RunInterval:
        """The judged part of a run: all but the warm-up."""
        end = self.lasts_s / 2 + (self._warm_s if self.half is TraceHalf.TEST else 0.0)
        return RunInterval(self._warm_s, end)

    @property
    def begins_s(self) -> float:
        """The instant of the trace at which a run begins."""
        return self.lasts_s / 2 - self._warm_s if self.half is TraceHalf.TEST else 0.0

    def arrivals(self, factor: float, seed: int) -> list[Arrival]:
        """``factor`` times the requests of the trace, from the beginning of a run to the end of the half."""
        return _arrivals(self, factor, seed)

    def deployment(self, lead_s: float, scale: dict[str, Any] | None = None) -> Deployment:
        """The deployment of the model, whose starts take ``lead_s``; ``scale`` replaces defaults."""
        control: dict[str, Any] = {
            "slo": {key: getattr(self, key) for key in ("ttft_p95_s", "itl_p95_s", "attainment")},
            "assumed_start_s": lead_s,
        }
        if scale:
            control["scale"] = scale
        model = {
            "name": MODEL,
            "engine": "sim",
            "sim": {"profile": self.profile},
            "engine_args": {"max_model_len": self.longest},
            "shapes": {SHAPE: {"gpus": 1}},
            "modes": {MODE: {"shape": SHAPE, "replicas": {"min": 1, "max": MOST}}},
            "control": control,
        }
        return parse({"models": [model], "budget": {"gpus": MOST}})

    def problem(
        self, arrivals: list[Arrival], mu: float, lead_s: float, *, since: float
    ) -> ProvisioningProblem:
        """The problem of the offline optimum from ``since`` on, at ``mu`` requests per second per replica."""
        at = np.array([arrival.at for arrival in arrivals])
        return ProvisioningProblem(
            demand=bin_arrivals(at, BIN_S, since, self.stretch.until),
            bin_s=BIN_S,
            mu=mu,
            lead_s=lead_s,
            attainment=self.attainment,
            wait_s=self.ttft_p95_s,
            least=1,
        )

    def bound(self, arrivals: list[Arrival], lead_s: float, *, since: float) -> float:
        """The replica-seconds that no run from ``since`` on can undercut."""
        spec = self.deployment(lead_s).models[0]
        tokens = tokens_of(arrivals)
        work = least_work(shipped(spec, spec.shapes[SHAPE]), tokens)
        limits = self.problem(arrivals, 1.0, lead_s, since=since)
        until, slo = self.stretch.until, spec.control.slo
        return lower_bound(
            least_problem(tokens, work, slo, since=since, until=until, wait_s=0.0, shape=limits)
        ).replica_s

    @property
    def _warm_s(self) -> float:
        return min(WARM_S, WARM_PART * self.lasts_s / 2)


@lru_cache(maxsize=8)
def _arrivals(setup: PolicyBenchmarkSetup, factor: float, seed: int) -> list[Arrival]:
    drawn = resample(open_trace(setup.trace), factor, seed)
    return list(slice_trace(drawn, setup.begins_s, setup.begins_s + setup.stretch.until))


def setup_of(trace: Path, half: TraceHalf) -> PolicyBenchmarkSetup:
    """The setup for a trace: an 8B model on an L4, or on an H100 where prompts are long.

    So a trace of a few requests per second needs about ten replicas, and a run takes seconds. The KV cache of
    an L4 is too small for several prompts of many thousands of tokens.
    """
    last, longest, tokens, requests = 0.0, 0, 0, 0
    for arrival in open_trace(trace):
        last, tokens, requests = arrival.at, tokens + arrival.input_tokens, requests + 1
        longest = max(longest, arrival.input_tokens + arrival.output_tokens)
    if tokens > LONG_TOKENS * requests:
        return PolicyBenchmarkSetup(trace, half, last, longest, "h100-8b", ttft_p95_s=8.0, itl_p95_s=0.2)
    return PolicyBenchmarkSetup(trace, half, last, longest, "l4-8b", ttft_p95_s=2.0, itl_p95_s=0.2)
