"""The prompts that are ahead at a replica: counted until their first token, seen or foreseen."""

from __future__ import annotations

import time
from pathlib import Path

from gateway.routing.replica import ReplicaHandle
from gateway.routing.shared_memory import SharedRows
from policy.hashing import hash_name
from tests.gateway.fake_replica import ready_replica


async def test_a_prefill_that_nobody_will_see_end_is_over_when_that_was_foreseen(tmp_path: Path) -> None:
    mine, others = (SharedRows(tmp_path / "rows", row) for row in range(2))
    replica = ReplicaHandle(ready_replica(), 1.0, None, mine)
    for tokens in (100, 20, 3):
        replica.begin(tokens)
    others.beat()
    assert replica.look().pending_tokens == others.others(hash_name("r"))[1] == 123
    now = time.monotonic()
    replica.foresee(100, now - 1.0)
    ahead = replica.foresee(20, now + 3600.0)
    assert replica.look().pending_tokens == others.others(hash_name("r"))[1] == 23
    replica.first_token(3, now)
    assert replica.look().pending_tokens == 20
    for _ in range(2):  # its request has ended before, and is over once
        replica.over(ahead)
        assert replica.look().pending_tokens == others.others(hash_name("r"))[1] == 0
    assert replica.look().in_flight == 3
    mine.close()
    others.close()
