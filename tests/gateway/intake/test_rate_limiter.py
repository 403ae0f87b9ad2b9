"""The limits of keys and tenants over several workers of a host: bounds, refusals, kills and shares."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.intake.limit_headers import duration
from gateway.intake.principal import Principal, WorkerTenant
from gateway.intake.rate_limiter import DESCRIBED_A_TURN, RateLimiter, RequestReservation
from gateway.intake.shared_limits import ACCOUNTING, SharedLimits, subject_key
from gateway.protocol.errors import Refused
from policy.config.tenancy import AccessPolicy, LimitName
from policy.tenancy.budget_period import period_of
from tests.clock import Clock

NANO = 1_000_000_000
KEY, TENANT = subject_key("key-1", is_key=True), subject_key("web", is_key=False)


class Host:
    """Workers of one host that count in one file, on one clock; ``wall`` is the clock that may be set."""

    def __init__(self, path: Path, workers: int = 2) -> None:
        self.path = path
        self.clock, self.wall = Clock(1000.0), Clock(1e9)
        self._opened = list[SharedLimits]()
        self.workers = [self.start(row) for row in range(workers)]

    def start(self, row: int) -> RateLimiter:
        return RateLimiter(self._open(row), self.clock, self.wall)

    def restart(self, row: int) -> RateLimiter:
        """Another worker in the place of one that ends."""
        self._opened.pop(row).close()
        return self.start(row)

    def accounting(self) -> SharedLimits:
        return self._open(ACCOUNTING)

    def _open(self, row: int) -> SharedLimits:
        self._opened.append(SharedLimits(self.path, row, self.clock))
        return self._opened[-1]

    def close(self) -> None:
        """Close the files of all, also of those that were killed."""
        for limits in self._opened:
            limits.close()

    def beat(self) -> None:
        for worker in self.workers:
            worker.beat()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path / "rows")
    yield host
    host.close()


def principal(key: AccessPolicy | None = None, tenant: AccessPolicy | None = None) -> Principal:
    return Principal(WorkerTenant("web", b""), "key-1", (tenant or AccessPolicy(), key or AccessPolicy()))


def admitted(
    limiter: RateLimiter, who: Principal, tokens: int = 1, nano: int = 0
) -> RequestReservation | None:
    try:
        return limiter.admit(who, tokens, nano)
    except Refused:
        return None


def burst(host: Host, who: Principal, count: int, tokens: int = 1) -> int:
    """How many of ``count`` requests in turn at all workers are admitted."""
    workers = host.workers
    return sum(admitted(workers[i % len(workers)], who, tokens) is not None for i in range(count))


class Workers(RuleBasedStateMachine):
    """Three workers, killed and restarted at will, beside what one bucket for all events would allow."""

    LIMIT, RATE = 60_000, 1000.0
    GAP_S = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.host = Host(Path(self.folder.name) / "rows", 3)
        self.who = principal(AccessPolicy(tpm_limit=self.LIMIT, rpm_limit=1_000_000))
        self.running: list[tuple[int, RequestReservation, int]] = []
        # Of each admitted request when, and what it used or may yet use.
        self.used: list[list[Any]] = []

    def teardown(self) -> None:
        self.host.close()
        self.folder.cleanup()

    @rule(worker=st.integers(0, 2), tokens=st.integers(1, 40_000))
    def admit(self, worker: int, tokens: int) -> None:
        reservation = admitted(self.host.workers[worker], self.who, tokens)
        if reservation is not None:
            self.used.append([self.host.clock.now, tokens])
            self.running.append((worker, reservation, len(self.used) - 1))

    @rule(which=st.integers(0, 1000), part=st.floats(0, 1.0), began=st.booleans())
    def settle(self, which: int, part: float, began: bool) -> None:
        if self.running:
            _, reservation, index = self.running.pop(which % len(self.running))
            tokens = int(self.used[index][1] * part)
            self.used[index][1] = tokens
            reservation.settle(tokens, 0, began=began)
            reservation.settle(99_999, 0, began=True)  # only the first counts

    @rule(elapsed_s=st.floats(0.001, 30), wall_s=st.floats(-1e6, 1e6))
    def wait(self, elapsed_s: float, wall_s: float) -> None:
        self.host.wall.now += wall_s
        while elapsed_s > 0:
            self.host.clock.now += min(elapsed_s, self.GAP_S)
            elapsed_s -= self.GAP_S
            self.host.beat()

    @rule(worker=st.integers(0, 2))
    def kill(self, worker: int) -> None:
        self.host.workers[worker] = self.host.start(worker)
        self.running = [entry for entry in self.running if entry[0] != worker]

    @rule()
    def kill_all(self) -> None:
        for worker in range(3):
            self.kill(worker)

    @invariant()
    def no_window_has_more_than_the_limit_and_its_refill(self) -> None:
        total, now = 0, self.host.clock.now
        for at, tokens in reversed(self.used):
            total += tokens
            bound = self.LIMIT + self.RATE * (now - at + self.GAP_S)
            assert total <= bound + 1, (total, bound)

    @invariant()
    def no_more_is_refunded_than_was_reserved(self) -> None:
        for worker in self.host.workers:
            for state in worker.states():
                slot = state.slot
                assert 0 <= slot.tokens_back <= slot.tokens
                assert 0 <= slot.requests_back <= slot.requests
                assert slot.running >= 0
                assert slot.open == 0


TestWorkers = pytest.mark.slow(Workers.TestCase)
TestWorkers.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)


def test_two_workers_admit_together_what_the_limit_allows(host: Host) -> None:
    assert burst(host, principal(AccessPolicy(rpm_limit=30)), 100) == 30
    host.clock.now += 10
    assert burst(host, principal(AccessPolicy(rpm_limit=30)), 100) == 5


def test_the_tighter_of_key_and_tenant_holds_and_is_named(host: Host) -> None:
    who = principal(AccessPolicy(rpm_limit=3), AccessPolicy(rpm_limit=50, tpm_limit=1000))
    reservation = host.workers[0].admit(who, 100, 0)
    assert reservation.headers == [
        (b"x-ratelimit-limit-requests", b"3"),
        (b"x-ratelimit-remaining-requests", b"2"),
        (b"x-ratelimit-reset-requests", b"20s"),
        (b"x-ratelimit-limit-tokens", b"1000"),
        (b"x-ratelimit-remaining-tokens", b"900"),
        (b"x-ratelimit-reset-tokens", b"6s"),
    ]
    burst(host, who, 2)
    with pytest.raises(Refused) as refused:
        host.workers[1].admit(who, 1, 0)
    error = refused.value
    assert (error.status, error.code, error.type) == (429, "rate_limit_exceeded", "rate_limit_error")
    assert error.message == (
        "Rate limit reached for API key 'key-1': rpm_limit is 3 requests per minute. Try again in 20s."
    )
    assert dict(error.headers())[b"retry-after"] == b"20"
    assert dict(error.headers())[b"x-ratelimit-remaining-requests"] == b"0"
    # Nothing of it counts for the tenant, either.
    assert host.workers[0].describe(who.limited[0])[LimitName.TOKENS]["remaining"] == 898


@pytest.mark.parametrize(
    ("access", "message"),
    [
        (AccessPolicy(tpm_limit=100), "tpm_limit is 100 tokens per minute. Try again in 36s."),
        (
            AccessPolicy(max_parallel_requests=2),
            "max_parallel_requests is 2 requests at a time. Try again in 1s.",
        ),
        (AccessPolicy(max_budget=0.5), "max_budget is 0.5, and it is spent."),
    ],
)
def test_each_limit_says_what_it_allows(host: Host, access: AccessPolicy, message: str) -> None:
    who = principal(tenant=access)
    for worker in host.workers:
        assert admitted(worker, who, 50, NANO // 4)
    with pytest.raises(Refused) as refused:
        host.workers[0].admit(who, 60, 0)
    assert refused.value.message == f"Rate limit reached for tenant 'web': {message}"
    assert (b"x-should-retry", b"false") in refused.value.headers() or not refused.value.final


def test_unused_tokens_are_refunded_and_a_request_that_never_began_is_none(host: Host) -> None:
    who = principal(AccessPolicy(rpm_limit=2, tpm_limit=100))
    host.workers[0].admit(who, 100, 0).settle(0, 0, began=False)
    host.workers[1].admit(who, 100, 0).settle(30, 0, began=True)
    shown = host.workers[0].describe(who.limited[0])
    assert (shown[LimitName.REQUESTS]["remaining"], shown[LimitName.TOKENS]["remaining"]) == (1, 70)


def test_what_is_used_beyond_the_reservation_is_a_debt(host: Host) -> None:
    who = principal(AccessPolicy(tpm_limit=60))
    host.workers[0].admit(who, 1000, 0).settle(90, 0, began=True)
    host.clock.now += 30
    assert not admitted(host.workers[1], who)
    host.clock.now += 1
    assert admitted(host.workers[1], who)


def test_a_limit_in_dry_run_is_counted_and_not_enforced(host: Host) -> None:
    who = principal(AccessPolicy(rpm_limit=2, max_parallel_requests=1, dry_run=tuple(LimitName)))
    assert burst(host, who, 6) == 6
    assert who.account.counters.exceeded == {
        ("rpm_limit", "key", "dry_run"): 4, ("max_parallel_requests", "key", "dry_run"): 5
    }  # fmt: skip
    shown = host.workers[0].describe(who.limited[0])
    assert shown[LimitName.REQUESTS] == {"limit": 2, "remaining": 0, "share": 1.0, "dry_run": True}
    assert host.workers[0].admit(who, 1, 0).headers == []
    # What it would have refused is no debt when it is enforced.
    host.clock.now += 30
    assert burst(host, principal(AccessPolicy(rpm_limit=2)), 6) == 1


def test_a_killed_worker_runs_nothing_and_its_successor_knows_the_levels(host: Host) -> None:
    who = principal(AccessPolicy(rpm_limit=10, tpm_limit=600, max_parallel_requests=4))
    assert burst(host, who, 4, 100) == 4
    host.workers = [host.start(row) for row in range(2)]
    shown = host.workers[0].describe(who.limited[0])
    assert [shown[limit]["remaining"] for limit in (LimitName.REQUESTS, LimitName.TOKENS)] == [6, 200]
    assert shown[LimitName.PARALLEL]["running"] == 0
    # One that is not replaced runs nothing after three seconds.
    assert burst(host, who, 2) == 2
    host.clock.now += 3.5
    host.workers[1].beat()
    assert host.workers[1].describe(who.limited[0])[LimitName.PARALLEL]["running"] == 1


def test_another_limit_holds_for_what_was_used_before(host: Host) -> None:
    assert burst(host, principal(AccessPolicy(rpm_limit=100)), 60) == 60
    assert burst(host, principal(AccessPolicy(rpm_limit=20)), 60) == 20
    host.clock.now += 6
    assert burst(host, principal(AccessPolicy(rpm_limit=100)), 60) == 10


def test_a_budget_is_what_the_ledger_knows_and_what_was_spent_since(host: Host) -> None:
    accounting, who = host.accounting(), principal(AccessPolicy(max_budget=1.0, budget_duration="1d"))
    first, second = host.workers
    spent, end = NANO // 10, period_of("1d", host.wall.now).end
    host.wall.now = end - 100
    first.admit(who, 1, spent).settle(1, spent, began=True)
    before = accounting.spent_by_host(KEY)
    accounting.publish_spent(KEY, 7 * spent, before, end)
    second.admit(who, 1, spent).settle(1, spent, began=True)
    assert first.describe(who.limited[0])[LimitName.BUDGET]["spent"] == pytest.approx(0.8)
    assert admitted(second, who, 1, 3 * spent)  # the one that crosses it is served
    with pytest.raises(Refused, match=r"max_budget is 1, and it is spent. Try again in 1m40s."):
        first.admit(who, 1, 0)
    # A new period, of which the accounting process has not told yet.
    host.wall.now += 101
    assert admitted(second, who, 1, 0)
    assert first.describe(who.limited[0])[LimitName.BUDGET]["spent"] == 0.0


@pytest.mark.parametrize("known", [True, False])
def test_while_the_ledger_is_away_the_workers_share_one_budget_in_each_period(
    host: Host, known: bool
) -> None:
    who = principal(AccessPolicy(max_budget=1.0, budget_duration="1h"))
    spent, end = NANO // 10, period_of("1h", host.wall.now).end
    if known:
        host.accounting().publish_spent(KEY, 0, 0, end)

    def served(worker: RateLimiter) -> int:
        count = 0
        while reservation := admitted(worker, who, 1, spent):
            reservation.settle(1, spent, began=True)
            count += 1
        return count

    assert served(host.workers[1]) == 10
    host.wall.now = end
    assert (served(host.workers[0]), served(host.workers[1])) == (10, 0)
    host.workers[0] = host.restart(0)
    assert (served(host.workers[0]), served(host.workers[1])) == (0, 0)
    with pytest.raises(Refused, match="Try again in 1h0m0s"):
        host.workers[0].admit(who, 1, 0)
    host.wall.now = end + 3600
    assert (served(host.workers[1]), served(host.workers[0])) == (10, 0)


def test_a_host_has_its_share_of_a_limit_and_without_one_admits_a_request(host: Host) -> None:
    accounting, who = host.accounting(), principal(AccessPolicy(rpm_limit=60, max_parallel_requests=40))
    accounting.publish_hosts(2, host.clock.now + 100)
    assert burst(host, who, 10) == 1
    accounting.publish_lease(KEY, 0.5, host.clock.now + 3, full=False)
    host.beat()
    assert burst(host, who, 10) == 0
    host.clock.now += 2.9
    assert burst(host, who, 10) == 0
    accounting.publish_lease(KEY, 0.5, host.clock.now + 100, full=False)
    host.clock.now += 30
    assert burst(host, who, 100) == 15
    accounting.publish_hosts(1, host.clock.now + 100)
    host.clock.now += 10
    assert burst(host, who, 100) == 10


def test_a_limit_that_no_host_used_begins_full_and_an_outage_of_the_database_leaves_an_equal_part(
    host: Host,
) -> None:
    accounting, who = host.accounting(), principal(AccessPolicy(rpm_limit=60))
    accounting.publish_hosts(3, host.clock.now + 50)
    assert burst(host, who, 5) == 1
    accounting.publish_lease(KEY, 1.0, host.clock.now + 3, full=True)
    assert burst(host, who, 100) == 59
    host.clock.now += 60
    assert burst(host, who, 100) == 20


async def test_limits_in_use_are_those_of_all_workers(host: Host) -> None:
    key, tenant = principal(AccessPolicy(rpm_limit=3)), principal(tenant=AccessPolicy(rpm_limit=5))
    admitted(host.workers[0], key)
    admitted(host.workers[1], tenant)
    for worker in host.workers:
        found = await worker.in_use([key, tenant])
        shown = {entry["of"]: entry["limits"]["rpm_limit"]["remaining"] for entry in found}
        assert shown == {"key": 2, "tenant": 4}
    host.clock.now += 61
    assert await host.workers[0].in_use([key, tenant]) == []


async def test_many_limits_are_described_over_several_turns(host: Host) -> None:
    looks = 0

    def clock() -> float:
        nonlocal looks
        looks += 1
        return host.clock.now

    worker = RateLimiter(SharedLimits(host.path, 2, host.clock), clock, host.wall)
    account = WorkerTenant("web", b"")
    access = (AccessPolicy(rpm_limit=1000), AccessPolicy(rpm_limit=1))
    callers = [Principal(account, f"key-{i}", access) for i in range(3 * DESCRIBED_A_TURN)]
    for each in callers:
        admitted(worker, each)
    asked = asyncio.create_task(worker.in_use(callers))
    turns = [looks]
    while not asked.done():
        await asyncio.sleep(0)
        turns.append(looks)
    # The tenant is described once, with the first of its keys.
    assert len(asked.result()) == len(callers) + 1
    assert max(after - before for before, after in itertools.pairwise(turns)) <= DESCRIBED_A_TURN + 2
    worker.close()


def test_where_more_are_in_use_than_slots_the_least_used_are_forgotten(tmp_path: Path) -> None:
    host = Host(tmp_path / "rows", 1)
    limits = AccessPolicy(rpm_limit=5)

    def of(number: int) -> Principal:
        return Principal(WorkerTenant("web", b""), f"key-{number}", (AccessPolicy(), limits))

    # All of them want slots near those of the first.
    near = subject_key("key-0", is_key=True) % 16_384
    many = [n for n in range(1, 60_000) if (subject_key(f"key-{n}", is_key=True) - near) % 16_384 < 4][:16]
    for number in (0, *many):
        host.clock.now += 0.01
        assert host.workers[0].admit(of(number), 1, 0)
    assert burst(host, of(many[-1]), 10) == 4


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0ms"),
        (0.0171, "18ms"),
        (1, "1s"),
        (7.66, "7.66s"),
        (59.9999, "1m0s"),
        (360, "6m0s"),
        (90_180, "25h3m0s"),
    ],
)
def test_durations_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_keys_are_in_force_when_all_living_workers_say_so(tmp_path: Path) -> None:
    clock = Clock(1000.0)
    accounting = SharedLimits(tmp_path / "rows", ACCOUNTING, clock)
    assert accounting.access_in_force(5), "there is no worker"
    first, second = (SharedLimits(tmp_path / "rows", row, clock) for row in range(2))
    first.publish_access(5)
    assert not accounting.access_in_force(5)
    second.publish_access(6)
    assert accounting.access_in_force(5) and not accounting.access_in_force(6)
    second.close()
    SharedLimits(tmp_path / "rows", 1, clock)
    assert not accounting.access_in_force(5), "a worker that starts has read nothing yet"
    clock.now += 4
    first.beat()
    assert accounting.access_in_force(5), "the other died"


class TickingClock:
    """A clock that is a millisecond further each time that it is read."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def test_a_beat_ends_in_time_and_the_next_one_goes_on(tmp_path: Path) -> None:
    shown: set[int] = set()
    clock = TickingClock()
    limiter = RateLimiter(SharedLimits(tmp_path / "rows", 0, Clock()), clock)
    account = WorkerTenant("web", b"")
    names = [f"key-{i}" for i in range(12)]
    for name in names:
        limiter.admit(Principal(account, name, (AccessPolicy(), AccessPolicy(rpm_limit=60))), 1, 0)
    states = list(limiter.states())
    looked: list[float] = []
    for _ in range(4):
        before = [state._looked_at for state in states]
        limiter.beat()
        shown |= {i for i, state in enumerate(states) if state._looked_at != before[i]}
        looked.append(len(shown))
    assert looked == [3, 6, 9, 12]


def test_only_rows_with_other_keys_are_searched(tmp_path: Path) -> None:
    me, unchanged, busy = (SharedLimits(tmp_path / "rows", row, Clock()) for row in range(3))
    slot = me.open(KEY, counts=True)
    # As no process does it: the row has the key, and does not say so.
    hidden = slot.at - me._rows.base + unchanged._rows.base
    unchanged._words[hidden] = KEY
    busy.open(TENANT, counts=True)
    me.look(slot)
    assert slot.places == []
    unchanged.open(TENANT, counts=True)
    me.look(slot)
    assert [place.at for place in slot.places] == [hidden]


# They all belong into the same few slots of a row, so that some take the place of others.
CROWDED = [1 + 16_384 * i for i in range(1, 21)]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 4), st.sampled_from(["open", "restart", "die", "look"]), st.sampled_from(CROWDED)
        ),
        max_size=60,
    )
)
def test_a_slot_is_found_where_a_new_search_finds_it(steps: list[tuple[int, str, int]]) -> None:
    with TemporaryDirectory() as folder:
        path, clock = Path(folder) / "rows", Clock()
        me = SharedLimits(path, 0, clock)
        others: dict[int, SharedLimits] = {}
        numbers = [1, 2, 3, ACCOUNTING]
        slots = [me.open(key, counts=False) for key in CROWDED]
        for number, what, key in steps:
            row = numbers[number - 1]
            clock.now += 0.01
            if what in ("restart", "die") and row in others:
                others.pop(row).close()
            if what != "die" and row not in others:
                others[row] = SharedLimits(path, row, clock)
            if what == "open":
                slot = others[row].open(key, counts=True)
                slot.running += 1
                slot.spent += 5
                others[row].write(slot)
            if what == "look":
                me.beat()
                for slot in slots:
                    me.look(slot)
                    new = me.open(slot.key, counts=False)
                    assert {(p.at, p.lives) for p in slot.places} == {(p.at, p.lives) for p in new.places}
                    assert slot.accounting == new.accounting
                    assert (slot.all_running, slot.all_spent) == (new.all_running, new.all_spent)
        for each in [me, *others.values()]:
            each.close()
