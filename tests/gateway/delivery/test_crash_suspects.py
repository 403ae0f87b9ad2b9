"""Requests that were in flight when replicas died, in the workers of a host."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from gateway.delivery.crash_suspects import HUNG_S, HostCrashSuspects, fingerprint
from gateway.protocol.body import read
from gateway.protocol.errors import Refused
from gateway.routing.model_routers import ModelRouters
from gateway.routing.shared_counters import LOCAL, SharedRows
from policy.admission.crash_suspects import SAME_DEATH_S
from policy.request import Request

PATH = "/v1/completions"
BODY = b'{"model":"m","prompt":"hi","logprobs":1}'


@pytest.mark.parametrize(
    ("path", "raw", "same"),
    [
        (PATH, b'{"prompt":"hi", "seed":4, "stream":true, "logprobs":1, "user":"x", "model":"m"}', True),
        (PATH, b'{"model":"m","prompt":"hi","logprobs":2}', False),
        (PATH, b'{"model":"m","prompt":"hi"}', False),
        ("/v1/chat/completions", BODY, False),
    ],
)
def test_a_request_is_known_again_by_what_an_engine_computes(path: str, raw: bytes, same: bool) -> None:
    known, found = read(BODY), read(raw)
    assert (fingerprint("t", path, found) == fingerprint("t", PATH, known)) is same
    assert fingerprint("other", path, found) != fingerprint("t", path, found)


def test_requests_that_died_together_run_one_by_one() -> None:
    suspects = HostCrashSuspects(LOCAL)
    for replica in (1, 2):
        for request in (7, 8):
            suspects.lost(request, replica, 10.0)
        suspects.died("m", replica, 10.0)
    assert suspects.begin(7, 20.0)
    with pytest.raises(Refused) as refused:
        suspects.begin(8, 20.0)
    assert (refused.value.status, refused.value.final) == (503, False)
    suspects.served(7, 21.0)
    suspects.end()
    assert not suspects.begin(7, 22.0)
    assert suspects.begin(8, 22.0)
    suspects.lost(8, 3, 23.0)
    suspects.died("m", 3, 23.0)
    suspects.end()
    with pytest.raises(Refused) as refused:
        suspects.begin(8, 24.0)
    assert (refused.value.status, refused.value.final) == (500, True)


@pytest.mark.parametrize(("hung", "after_s", "counts"), [
    (False, SAME_DEATH_S - 1, True),
    (False, SAME_DEATH_S + 1, False),
    (True, HUNG_S - 1, True),
    (True, HUNG_S + 1, False),
])  # fmt: skip
def test_a_death_soon_after_a_request_ended_early_counts(hung: bool, after_s: float, counts: bool) -> None:
    suspects = HostCrashSuspects(LOCAL)
    for replica, at in ((1, 100.0), (2, 300.0)):
        suspects.ended_early(7, replica, at, hung=hung)
        suspects.ended_early(8, replica + 10, at, hung=hung)  # on one that lives on
        suspects.died("m", replica, at + after_s)
    now = 300.0 + after_s + 1
    assert not suspects.begin(8, now)
    if counts:
        with pytest.raises(Refused):
            suspects.begin(7, now)
    else:
        assert not suspects.some


async def test_the_workers_of_a_host_share_their_suspects(tmp_path: Path) -> None:
    rows = [SharedRows(tmp_path / "rows", i) for i in range(2)]
    for row in rows:
        row.beat()
    first, second = (HostCrashSuspects(row) for row in rows)
    routers = [
        ModelRouters(Random(1), row, lost=suspects.lost_elsewhere)  # noqa: S311 - ties, not secrets
        for row, suspects in zip(rows, (first, second), strict=True)
    ]
    for replica in (1, 2):
        first.lost(7, replica, 10.5)
        for each in (first, second):
            each.died("m", replica, 10.0)
    for router in routers:
        router.choose(Request("m"), [], 11.0)
    for each in (first, second):
        with pytest.raises(Refused):
            each.begin(7, 12.0)
    for row in rows:
        row.close()
