"""The token bucket beside one that sees every event, budget periods, shares of hosts, and counted tokens."""

from __future__ import annotations

import datetime
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.tenancy.budget_period import FOREVER, period_of
from policy.tenancy.lease_shares import LimitLeaseHolder, decayed, next_share
from policy.tenancy.token_bucket import NO_SHARE_WAIT_S, TokenBucket, level_of
from policy.tenancy.token_count import cached_weight, most_tokens, used_tokens

EVENTS = st.lists(st.tuples(st.floats(0, 5), st.integers(-400, 400), st.booleans()), max_size=60)


@given(EVENTS, st.integers(1, 1000), st.sampled_from([1.0, 0.5, 0.1]))
def test_who_looks_seldom_sees_no_more_and_lacks_at_most_a_refill(
    events: list[tuple[float, int, bool]], limit: int, share: float
) -> None:
    every, seldom = (TokenBucket(limit, share, 0.0, limit) for _ in range(2))
    now = last = reserved = refunded = 0.0
    for elapsed, tokens, looks in events:
        now += elapsed
        every.observe(now, 0.0, 0.0)
        back = every.refundable(-tokens, now) if tokens < 0 else 0.0
        every.observe(now, max(tokens, 0), back)
        reserved, refunded = reserved + max(tokens, 0), refunded + back
        if looks:
            seldom.observe(now, reserved, refunded)
            assert every.level - seldom.capacity / 60 * (now - last) - 1e-6 <= seldom.level
            assert seldom.level <= every.level + 1e-6
            # From here on both begin alike.
            seldom.level, last, reserved, refunded = every.level, now, 0.0, 0.0


def test_a_full_bucket_admits_a_minutes_worth_and_then_its_rate() -> None:
    bucket = TokenBucket(60, 1.0, 0.0, 60)
    bucket.observe(0.0, 60, 0)
    assert bucket.wait_s(1, 0) == pytest.approx(1.0)
    bucket.observe(1.0, 0, 0)
    assert bucket.wait_s(1, 0) == 0.0
    bucket.observe(1000.0, 0, 0)
    assert bucket.level == 60


def test_a_request_for_more_than_the_capacity_waits_for_a_full_bucket_and_leaves_a_debt() -> None:
    bucket = TokenBucket(60, 0.5, 0.0, 60)
    assert (bucket.level, bucket.wait_s(50, 0)) == (30, 0.0)
    bucket.observe(0.0, 50, 0)
    assert bucket.level == -20
    assert bucket.wait_s(1, 0) == pytest.approx(42.0)
    assert bucket.full_in_s() == pytest.approx(100.0)
    assert level_of(60, 0.5, bucket.full_in_s()) == pytest.approx(-20)


def test_without_a_share_one_request_is_admitted() -> None:
    bucket = TokenBucket(60, 0.0, 0.0, 60)
    bucket.observe(0.0, 5, 0)
    assert bucket.wait_s(5, 5) == 0.0
    bucket.observe(9.0, 5, 0)
    assert bucket.wait_s(5, 5) == NO_SHARE_WAIT_S
    bucket.resize(60, 1.0)
    assert bucket.level == -10


@pytest.mark.parametrize(
    ("allowed", "context", "choices", "most"),
    [
        (100, 4096, 1, 110),
        (1 << 20, 4096, 2, 10 + 2 * 4086),
        (1 << 20, None, 1, 10 + (1 << 20)),
        (0, 4096, 1, 4096),
        (0, 4096, 3, 10 + 3 * 4086),
        (0, None, 1, 10),
    ],
)
def test_a_request_may_use_its_prompt_and_the_allowed_answer(
    allowed: int, context: int | None, choices: int, most: int
) -> None:
    assert most_tokens(10, allowed, context, choices) == most


def test_cached_tokens_count_by_their_price() -> None:
    assert (cached_weight(0.0, 0.0), cached_weight(2.0, 0.5), cached_weight(1.0, 3.0)) == (1.0, 0.25, 1.0)
    assert used_tokens(100, 80, 7, 1.0) == 107
    assert used_tokens(100, 81, 7, 0.25) == 47


@given(st.datetimes(datetime.datetime(1970, 1, 1), datetime.datetime(2400, 1, 1)))
def test_periods_are_those_of_the_calendar(moment: datetime.datetime) -> None:
    moment = moment.replace(tzinfo=datetime.UTC)
    now, midnight = moment.timestamp(), moment.replace(hour=0, minute=0, second=0, microsecond=0)
    first = midnight.replace(day=1)
    following = (first + datetime.timedelta(days=32)).replace(day=1)
    quarter = first.replace(month=(first.month - 1) // 3 * 3 + 1)
    assert period_of("1mo", now) == (first.timestamp(), following.timestamp())
    assert period_of("3mo", now).begin == quarter.timestamp()
    assert period_of("1d", now) == (midnight.timestamp(), midnight.timestamp() + 86_400)
    assert period_of("7d", now).begin == midnight.timestamp() - moment.weekday() * 86_400
    assert period_of("30m", now).begin == now // 1800 * 1800


def test_a_budget_without_a_duration_is_forever_and_others_are_checked() -> None:
    assert period_of(None, 5.0) == FOREVER == (0.0, inf)
    for wrong in ("", "0d", "1w", "-1d", "1.5s", "d"):
        with pytest.raises(ValueError, match="is no period: expected whole seconds"):
            period_of(wrong, 0.0)


@pytest.mark.slow
@given(
    st.lists(st.floats(0, 100), min_size=2, max_size=5),
    st.lists(st.integers(0, 4), max_size=80),
)
def test_the_shares_of_hosts_are_at_most_the_limit_in_any_order(
    demands: list[float], turns: list[int]
) -> None:
    shares = [0.0] * len(demands)
    for turn in turns:
        me = turn % len(demands)
        others = [LimitLeaseHolder(shares[i], demands[i]) for i in range(len(demands)) if i != me]
        shares[me] = next_share(LimitLeaseHolder(shares[me], demands[me]), others)
        assert sum(shares) <= 1 + 1e-9
        assert min(shares) >= 0


def test_shares_follow_the_demand_and_an_unused_one_is_given_up() -> None:
    shares, demands = [1.0, 0.0, 0.0], [30.0, 10.0, 0.0]

    def turn() -> None:
        for me in range(3):
            others = [LimitLeaseHolder(shares[i], demands[i]) for i in range(3) if i != me]
            shares[me] = next_share(LimitLeaseHolder(shares[me], demands[me]), others)

    turn()
    turn()
    assert shares == [pytest.approx(0.75), pytest.approx(0.25), 0.0]
    demands[0] = 0.0
    turn()
    turn()
    assert shares == [0.0, 1.0, 0.0]


def test_demand_decays_to_none() -> None:
    demand = decayed(0.0, 50, 1.0)
    assert demand == pytest.approx(10.0)
    for _ in range(60):
        demand = decayed(demand, 0, 1.0)
    assert demand == 0.0
