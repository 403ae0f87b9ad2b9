"""Quantiles agree with numpy's definitions of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.stats.quantiles import interpolated, nearest_rank

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30)


@given(VALUES, st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]))
def test_both_definitions_agree_with_numpy(values: list[float], q: float) -> None:
    assert nearest_rank(values, q) == np.quantile(values, q, method="inverted_cdf")
    assert interpolated(values, q) == pytest.approx(float(np.quantile(values, q)), abs=1e-6)


@pytest.mark.parametrize("quantile", [nearest_rank, interpolated])
def test_no_values_have_no_quantile(quantile: object) -> None:
    assert callable(quantile)
    with pytest.raises(ValueError, match="no values"):
        quantile([], 0.5)
