"""Lets users' policies decide on sample views, so that an error is found before the policy runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from policy.config.deployment import Deployment, ModelSpec
from policy.engine.replica_capacity import Capability
from policy.errors import ConfigError
from policy.scaling.policies.registry import CUSTOM, choose
from policy.scaling.view import Supply, View
from policy.signals.types import LatencyQuantiles, ModelDemand, Rates, ReplicaSample, Signals
from serve.autoscaler.custom_policy import GuardedPolicy, load_within

# Maximum duration of a sample decision; the first one may import modules.
SAMPLE_DECISION_S = 5.0
# Policies whose sample decision has not ended, by class and parameters: a watched deployment file is tried
# again and again, and each call would be one more thread that may never end.
_unfinished: dict[tuple[type, str], GuardedPolicy] = {}

_AT = 1_767_268_800.0  # noon of a day
_RATES = Rates(last_6_s=3.0, last_20_s=2.5, last_60_s=2.0, last_600_s=1.5)
_NONE = Rates(last_6_s=0.0, last_20_s=0.0, last_60_s=0.0, last_600_s=0.0)
_LATENCY = LatencyQuantiles(count=120, p50=0.2, p90=0.4, p95=0.5, p99=1.0)
_MEASURED = Signals(
    demand=ModelDemand(
        age_s=1.0, arrivals=_RATES, refused=_NONE, concurrency=_RATES, queued=2, oldest_s=0.5,
        ttft=_LATENCY, itl=_LATENCY, e2e=_LATENCY, input_tokens=200.0, output_tokens=100.0, hit=0.3,
    ),
    replicas=(
        ReplicaSample(id="replica-1", age_s=0.5, running=3, waiting=1, kv_used=0.4, tokens_per_s=300.0),
    ),
)  # fmt: skip


def sample_views(spec: ModelSpec) -> Iterator[View]:
    """The model as after a start, when nothing was measured, and a decision later under load."""
    bounds = spec.modes[spec.first_mode].bounds
    count = bounds.clamp(1)
    for place, signals in enumerate((Signals(), _MEASURED)):
        yield View(
            at=_AT + place * spec.control.tick_s,
            tick_s=spec.control.tick_s,
            model=spec.name,
            mode=spec.first_mode,
            count=count,
            least=bounds.min,
            most=bounds.max,
            supply=Supply(wanted=count, serving=count),
            signals=signals,
            capability=Capability(mu=2.0, mu_max=3.0, kv_tokens=100_000, seats=64),
            lead_s=spec.control.assumed_start_s,
            slo=spec.control.strictest_slo,
        )


def check_custom_policies(deployment: Deployment) -> None:
    """Raises :class:`policy.errors.ConfigError` if a user's policy fails on a sample view; not for a loop."""
    for spec in deployment.models:
        check_custom_policy(spec)


def check_custom_policy(
    spec: ModelSpec, patience_s: float = SAMPLE_DECISION_S, *, load_s: float = SAMPLE_DECISION_S
) -> None:
    """Raises :class:`policy.errors.ConfigError` if a user's policy of the model fails on a sample view.

    A policy that has not answered an earlier call yet is refused without another one.
    """
    control = spec.control
    for key, choice in (("policy", control.policy), ("shadow", control.shadow)):
        path = f"models[{spec.name}].control.{key}"
        if choice is None or (chosen := choose(path, choice)).name != CUSTOM or not spec.modes:
            continue
        loaded = load_within(load_s, chosen, path)
        called = type(loaded), repr(chosen.arguments)
        policy = _unfinished.pop(called, None) or GuardedPolicy(
            loaded, lambda _: None, alone=True, patience_s=patience_s
        )
        memory: Any = None
        for view in sample_views(spec):
            proposal, error = policy.propose(view, memory)
            if proposal is None:
                if policy.is_running:
                    _unfinished[called] = policy
                raise ConfigError(
                    path, chosen.class_path, f"a policy that decides on a sample view (it {error})"
                )
            memory = proposal.memory
