"""The written-out step of a prefill estimate against the step itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.engine.performance_model import BatchLimits, EngineModel, Timing
from policy.engine.prefill_estimate import GENERIC, StepTable

TABLES = [
    StepTable(
        Timing(limits=BatchLimits(max_num_batched_tokens=batch, max_num_seqs=256, kv_tokens=0), model=model)
    )
    for batch in (64, 1000, 8192)
    for model in (GENERIC.model, EngineModel(o=1e-3, w=2e-2, c=1e-4, g=1e-6, r=1e-4))
]


@given(
    table=st.sampled_from(TABLES),
    share=st.floats(1e-9, 0.999),
    kv_tokens=st.floats(0.0, 1e6),
    running=st.integers(0, 300),
)
def test_a_prefill_in_one_step_is_that_step(
    table: StepTable, share: float, kv_tokens: float, running: int
) -> None:
    """Also beside more requests than the batch has tokens, where the step goes beyond the table."""
    tokens = share * max(table.batch - running, table.batch * 0.1)
    step = table.step_s(running + tokens, kv_tokens, running + 1)
    assert table.prefill_s(tokens, kv_tokens, running) == pytest.approx(step, rel=1e-9)
