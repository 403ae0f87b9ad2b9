"""A new generation of real vLLM on real Ray, or its rollback, without interrupted streams."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.conftest import CHAT, changed
from tests.e2e.stack import Stack, eventually
from tests.e2e.traffic import Traffic

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.timeout(1200, func_only=True)]


@pytest.fixture
def small(stack: Stack) -> Iterator[Stack]:
    """One replica on one core, set by hand, so that another has room beside it; afterwards as it was."""
    with changed(stack):
        assert stack.run("mode", CHAT, "multi-replica").returncode == 0
        assert stack.run("scale", CHAT, "1").returncode == 0
        stack.steady(CHAT, 1)
        yield stack
        assert stack.run("scale", CHAT, "auto").returncode == 0


def test_an_upgrade_interrupts_no_stream_and_a_failed_one_is_rolled_back(small: Stack) -> None:
    stack = small
    (old,) = stack.replicas(CHAT)
    arguments = stack.document["models"][0]["engine_args"]
    with Traffic(stack, CHAT, clients=2) as traffic:
        # More than the model was trained for: vLLM says so, but only when it starts.
        known = dict(arguments)
        arguments["max_model_len"] = 1_000_000
        stack.apply()
        eventually(lambda: "rolled back" in stack.model(CHAT).note, 400, lambda: str(stack.model(CHAT)))
        stack.steady(CHAT, 1)
        assert {(r.id, r.pid) for r in stack.replicas(CHAT)} == {(old.id, old.pid)}
        assert "ValidationError" in stack.model(CHAT).note
        assert "rolled back from multi-replica" in stack.run("status").stdout
        # A corrected document applies at once: these engines already run.
        arguments.clear()
        arguments.update(known)
        stack.apply()
        stack.steady(CHAT, 1, timeout_s=10)
        assert {(r.id, r.pid) for r in stack.replicas(CHAT)} == {(old.id, old.pid)}
        arguments["max_num_seqs"] = 32
        stack.apply()
        eventually(lambda: stack.model(CHAT).generation != old.generation, 10)
        stack.steady(CHAT, 1)
        (new,) = stack.replicas(CHAT)
        assert new.generation == stack.model(CHAT).generation
        eventually(lambda: new.id in traffic.replicas, 240)
    assert not traffic.problems
    # The old replica served until the new one was ready.
    assert traffic.replicas == {old.id, new.id}
