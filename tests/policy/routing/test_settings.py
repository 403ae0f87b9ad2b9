"""The router settings from a model's section of the deployment file."""

from __future__ import annotations

from policy.config.control import ControlConfig, SloConfig
from policy.config.deployment import AdaptersConfig, ModelSpec
from policy.engine.prefill_estimate import GENERIC
from policy.routing.settings import START_SHARE, settings_of


def test_settings_from_a_deployment() -> None:
    spec = ModelSpec(
        name="m",
        profile="cpu-smollm2-135m",
        adapters=AdaptersConfig(slots_per_replica=3),
        control=ControlConfig(slo=SloConfig(ttft_p95_s=2.0, itl_p95_s=0.1)),
    )
    found = settings_of(spec)
    assert (found.start_s, found.itl_s, found.slots) == (START_SHARE * 2.0, 0.1, 3)
    assert found.assumed.limits.max_num_batched_tokens == 128


def test_settings_without_values_are_unbounded() -> None:
    bare = settings_of(ModelSpec(name="bare"))
    assert bare.assumed is GENERIC
    assert (bare.start_s, bare.slots) == (float("inf"), AdaptersConfig().slots_per_replica)


def test_a_profile_is_assumed_at_the_lowest_degree_that_fits() -> None:
    found = settings_of(ModelSpec(name="m", profile="h100-70b")).assumed
    assert found.model is not None and found.model.degree == 4
