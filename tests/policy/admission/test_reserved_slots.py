"""The last free slots are for those who have less than their share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policy.admission.fairness import ACTIVE_S, ReservedSlots

SLOTS = 16


def loud_with(running: int, weight: float = 1.0) -> ReservedSlots:
    reserve = ReservedSlots(lambda tenant: weight if tenant == "loud" else 1.0)
    reserve.came("quiet", 0.0)
    reserve.came("loud", 0.0)
    for _ in range(running):
        reserve.began("loud")
    return reserve


def test_a_loud_tenant_leaves_the_last_slots_to_a_quiet_one() -> None:
    reserve = loud_with(SLOTS - 2)
    assert reserve.kept_from("loud", 2, 1) == -1
    assert reserve.kept_from("quiet", 1, 1) == 0


def test_more_than_the_last_are_anybodys() -> None:
    assert loud_with(SLOTS - 3).kept_from("loud", 3, 3) == 0


def test_what_is_kept_is_spread_over_the_replicas() -> None:
    reserve = loud_with(SLOTS - 4)
    assert reserve.kept_from("loud", 4, 2) == 1
    assert reserve.kept_from("loud", 4, 1) == 2


def test_what_is_within_its_share_is_nobody_elses() -> None:
    assert loud_with(SLOTS - 1, weight=100.0).kept_from("loud", 1, 1) == 0
    assert loud_with(3).kept_from("loud", 1, 1) == -1  # three of four
    assert loud_with(3, weight=100.0).kept_from("loud", 1, 1) == 0


def test_who_is_alone_has_all() -> None:
    reserve = loud_with(SLOTS - 1)
    reserve.came("loud", ACTIVE_S + 0.1)
    assert not reserve.contended
    assert reserve.kept_from("loud", 1, 1) == 0


@given(st.lists(st.sampled_from("abc"), max_size=50), st.integers(1, 20), st.integers(1, 20))
def test_an_empty_fleet_serves_anyone(came: list[str], slots: int, replicas: int) -> None:
    """Nothing runs: whoever asks gets a slot, so nobody waits for nothing."""
    reserve = ReservedSlots(lambda tenant: 1.0)
    for at, tenant in enumerate(came):
        reserve.came(tenant, at / 10)
        reserve.began(tenant)
        reserve.ended(tenant)
    assert all(reserve.kept_from(tenant, slots, replicas) == 0 for tenant in "abc" if tenant in came)
