"""The power of devices by utilisation."""

from __future__ import annotations

import pytest

from policy.engine.builtin_profiles import PROFILES
from policy.engine.power import DRAWS, power_model_of


@pytest.mark.parametrize("kind", DRAWS)
def test_power_grows_linearly_with_utilisation(kind: str) -> None:
    draw = DRAWS[kind]
    idle, half, peak = (draw.watts(busy) for busy in (0.0, 0.5, 1.0))
    assert 0.0 < idle < half < peak
    assert half == pytest.approx((idle + peak) / 2)
    assert peak == pytest.approx(draw.peak_w + draw.host_w)
    assert "assumed" in draw.source


def test_every_gpu_type_with_a_profile_has_a_power_model() -> None:
    kinds = {name.partition("-")[0] for name in PROFILES} - {"sim"}
    assert kinds == set(DRAWS)


def test_an_unknown_gpu_type_has_the_peak_power_of_the_budget() -> None:
    draw = power_model_of("tpu", 200.0)
    assert draw.watts(1.0) == 200.0 and 0.0 < draw.watts(0.0) < 200.0
    assert "200 W" in draw.source
