"""The last free slots are for those who have less than their share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.admission.fairness import ACTIVE_S, ReservedSlots

SLOTS = 16


def loud_with(running: int, weight: float = 1.0) -> ReservedSlots:
    reserve = ReservedSlots(lambda tenant: weight if tenant == "loud" else 1.0)
    reserve.arrived("quiet", 0.0)
    reserve.arrived("loud", 0.0)
    for _ in range(running):
        reserve.began("loud")
    return reserve


@pytest.mark.parametrize(
    ("running", "weight", "asked", "kept"),
    [
        (SLOTS - 2, 1.0, ("loud", 2, 1), -1),
        (SLOTS - 2, 1.0, ("quiet", 1, 1), 0),
        # More than the last slots are anybody's.
        (SLOTS - 3, 1.0, ("loud", 3, 3), 0),
        # The reserve is spread over the replicas.
        (SLOTS - 4, 1.0, ("loud", 4, 2), 1),
        (SLOTS - 4, 1.0, ("loud", 4, 1), 2),
        # A tenant may use its whole share.
        (SLOTS - 1, 100.0, ("loud", 1, 1), 0),
        (3, 1.0, ("loud", 1, 1), -1),
        (3, 100.0, ("loud", 1, 1), 0),
    ],
)
def test_the_last_slots_are_kept_from_who_has_more_than_its_share(
    running: int, weight: float, asked: tuple[str, int, int], kept: int
) -> None:
    assert loud_with(running, weight).kept_from(*asked) == kept


def test_who_is_alone_has_all() -> None:
    reserve = loud_with(SLOTS - 1)
    reserve.arrived("loud", ACTIVE_S + 0.1)
    assert not reserve.contended
    assert reserve.kept_from("loud", 1, 1) == 0


@given(st.lists(st.sampled_from("abc"), max_size=50), st.integers(1, 20), st.integers(1, 20))
def test_an_empty_fleet_serves_anyone(came: list[str], slots: int, replicas: int) -> None:
    """Nothing runs: whoever asks gets a slot, so nobody waits for nothing."""
    reserve = ReservedSlots(lambda tenant: 1.0)
    for at, tenant in enumerate(came):
        reserve.arrived(tenant, at / 10)
        reserve.began(tenant)
        reserve.ended(tenant)
    assert all(reserve.kept_from(tenant, slots, replicas) == 0 for tenant in "abc" if tenant in came)
