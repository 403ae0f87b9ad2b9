"""Counts, prefixes and service shared by the workers of a host, through deaths, restarts, full tables."""

from __future__ import annotations

import multiprocessing
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.routing import shared_counters
from gateway.routing.shared_counters import READ_AT_ONCE, RING_ENTRIES, SharedRows
from tests.clock import Clock

REPLICA, OTHER = 0xFEED_FACE_CAFE_BEEF, 7


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture
def worker(tmp_path: Path, clock: Clock) -> Iterator[Callable[[int], SharedRows]]:
    opened: list[SharedRows] = []

    def open_row(row: int) -> SharedRows:
        opened.append(SharedRows(tmp_path / "rows", row, clock))
        return opened[-1]

    yield open_row
    for rows in opened:
        rows.close()


Worker = Callable[[int], SharedRows]


def test_the_file_has_mode_600(tmp_path: Path, worker: Worker) -> None:
    worker(0)
    assert stat.S_IMODE((tmp_path / "rows").stat().st_mode) == 0o600


OPS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from([REPLICA, OTHER, 8]), st.integers(0, 5000)), max_size=60
)


@settings(
    max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)  # every example takes new rows
@given(OPS)
def test_each_worker_sums_the_others_counts(tmp_path: Path, operations: list[tuple[int, int, int]]) -> None:
    rows = [SharedRows(tmp_path / "rows", i) for i in range(3)]
    held: list[tuple[int, int, int]] = []
    begun: list[tuple[int, int]] = []
    for who, key, tokens in operations:
        mine = next((entry for entry in held if entry[:2] == (who, key)), None)
        if mine is not None and tokens % 2:
            held.remove(mine)
            rows[who].first_token(key, mine[2])
            rows[who].end(key)
        else:
            held.append((who, key, tokens))
            begun.append((who, key))
            rows[who].begin(key, tokens)
    for who, row in enumerate(rows):
        row.beat()
        for key in (REPLICA, OTHER, 8):
            theirs = [entry for entry in held if entry[0] != who and entry[1] == key]
            ever = sum(key_begun == key for by, key_begun in begun if by != who)
            assert row.others(key) == (len(theirs), sum(entry[2] for entry in theirs), ever)
    for row in rows:
        row.close()


def test_a_worker_without_a_heartbeat_is_not_counted_until_the_next(worker: Worker, clock: Clock) -> None:
    me, other = worker(0), worker(1)
    other.begin(REPLICA, 10)
    clock.now += 3.0
    me.beat()
    assert me.others(REPLICA) == (1, 10, 1)
    clock.now += 0.1
    me.beat()
    assert me.others(REPLICA) == (0, 0, 0)
    other.beat()
    me.beat()
    assert me.others(REPLICA) == (1, 10, 1)


def test_a_replica_that_another_worker_uses_first_is_found_between_heartbeats(worker: Worker) -> None:
    me, other = worker(0), worker(1)
    me.beat()
    assert me.others(REPLICA) == (0, 0, 0)
    other.begin(REPLICA, 10)
    me.refresh()
    assert me.others(REPLICA) == (1, 10, 1)


def test_a_heartbeat_from_before_boot_is_ignored(worker: Worker, clock: Clock) -> None:
    me, other = worker(0), worker(1)
    other.begin(REPLICA, 10)
    clock.now = 5.0
    me.beat()
    assert me.others(REPLICA) == (0, 0, 0)


def test_a_restarted_worker_has_nothing_in_flight(worker: Worker) -> None:
    me, killed = worker(0), worker(1)
    killed.begin(REPLICA, 10)
    killed.served(1, 99)
    killed.publish(1, REPLICA, [11])
    me.beat()
    assert me.others(REPLICA) == (1, 10, 1)
    assert me.published_by_others() == [(1, REPLICA, [11])]
    # As after kill -9: the row is not released, and another worker takes it.
    successor = worker(1)
    me.beat()
    assert me.others(REPLICA) == (0, 0, 0)
    assert me.served_by_others(1) == 0
    successor.publish(1, REPLICA, [12])
    assert me.published_by_others() == [(1, REPLICA, [12])]


def test_the_connections_of_others_that_accept_are_known(worker: Worker) -> None:
    me, killed, starting = worker(0), worker(1), worker(2)
    me.report_connections(3)
    killed.report_connections(7)
    me.beat()
    assert [count for _, count in me.connections_of_others()] == [7]
    starting.report_connections(0)
    worker(1)
    me.beat()
    assert [count for _, count in me.connections_of_others()] == [0]
    starting.report_connections(-1)
    assert me.connections_of_others() == []


def test_a_closed_worker_is_not_counted(tmp_path: Path, clock: Clock) -> None:
    me, other = (SharedRows(tmp_path / "rows", i, clock) for i in (0, 1))
    other.begin(REPLICA, 10)
    other.close()
    me.beat()
    assert me.others(REPLICA) == (0, 0, 0)
    me.close()


def test_another_layout_is_not_read(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    worker(1).begin(REPLICA, 10)
    monkeypatch.setattr(shared_counters, "_THIS_LAYOUT", 5)
    assert worker(0).others(REPLICA) == (0, 0, 0)


# Keys that want the same slot; a window holds sixteen of them.
CROWD = [5 + 1024 * i for i in range(20)]


def test_a_full_table_skips_new_keys_and_never_counts_below_zero(worker: Worker) -> None:
    me, other = worker(0), worker(1)
    for key in CROWD:
        other.begin(key, 1)
    me.beat()
    assert [me.others(key)[0] for key in CROWD] == [1] * 16 + [0] * 4
    other.first_token(CROWD[0], 1)
    other.end(CROWD[0])
    # There is room again, but its begin was not counted.
    other.end(CROWD[16])
    other.begin(CROWD[16], 1)
    me.beat()
    assert all(count >= 0 for key in CROWD for count in me.others(key))


def test_the_slot_of_a_removed_replica_is_reused(worker: Worker) -> None:
    me, other = worker(0), worker(1)
    for key in CROWD[:16]:
        other.begin(key, 1)
        other.first_token(key, 1)
        other.end(key)
    me.beat()
    assert me.others(CROWD[0]) == (0, 0, 1)
    other.begin(CROWD[16], 3)
    # Even before the next beat, no count is taken for another replica's.
    assert me.others(CROWD[0]) == (0, 0, 0)
    me.beat()
    assert me.others(CROWD[16]) == (1, 3, 1)


def test_service_adds_up_and_can_be_corrected(worker: Worker) -> None:
    rows = [worker(i) for i in range(3)]
    for row in rows:
        row.served(1, 100)
    rows[1].served(1, -30)
    for row in rows:
        row.beat()
    assert [row.served_by_others(1) for row in rows] == [170, 200, 170]
    assert rows[0].served_by_others(2) == 0


def test_a_new_worker_reads_the_published_prefixes_that_remain(worker: Worker) -> None:
    first = worker(0)
    first.publish(1, REPLICA, list(range(RING_ENTRIES + 5)))
    new = worker(1)
    hashes = [prefix for read in reads(new) for prefix in read]
    assert hashes == list(range(5, RING_ENTRIES + 5))


def reads(worker: SharedRows) -> Iterator[list[int]]:
    """The prefixes that each call returns, until there are no more."""
    while found := worker.published_by_others():
        yield [prefix for _, _, hashes in found for prefix in hashes]


def test_a_request_reads_a_part_of_what_a_new_worker_finds(worker: Worker) -> None:
    others = [worker(1), worker(2)]
    for other in others:
        other.publish(1, REPLICA, list(range(RING_ENTRIES)))
    found = list(reads(worker(0)))
    assert max(map(len, found)) == READ_AT_ONCE
    assert sum(map(len, found)) == 2 * RING_ENTRIES


def test_a_worker_that_publishes_much_holds_no_other_back(worker: Worker) -> None:
    me, busy, calm = worker(0), worker(1), worker(2)
    me.beat()
    for _ in range(3):
        busy.publish(1, REPLICA, list(range(READ_AT_ONCE + 1)))
        calm.publish(1, OTHER, [7])
        found = me.published_by_others() + me.published_by_others()
        assert (1, OTHER, [7]) in found


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(st.none(), st.tuples(st.integers(1, 3), st.integers(1, 600))), max_size=20))
def test_all_that_is_published_is_read_once_and_in_its_order(
    tmp_path: Path, steps: list[tuple[int, int] | None]
) -> None:
    """``None``: a call. Less is published in between than the rings hold."""
    rows = [SharedRows(tmp_path / "rows", i) for i in range(4)]
    me = rows[0]
    me.beat()
    published: dict[int, list[int]] = {1: [], 2: [], 3: []}
    read: dict[int, list[int]] = {1: [], 2: [], 3: []}
    list(reads(me))  # those of the last example
    for step in [*steps, *[None] * 60]:
        if step is None:
            for _, replica, hashes in me.published_by_others():
                read[replica] += hashes
            continue
        who, count = step
        if len(published[who]) - len(read[who]) + count <= RING_ENTRIES:
            hashes = [len(published[who]) + i for i in range(count)]
            rows[who].publish(9, who, hashes)
            published[who] += hashes
    assert read == published
    for row in rows:
        row.close()


def test_a_torn_entry_is_skipped(worker: Worker) -> None:
    me, other = worker(0), worker(1)
    me.beat()
    other.publish(1, REPLICA, [10, 11, 12])
    at = other._base + shared_counters._RING + shared_counters._ENTRY_WORDS
    other._words[at + 2] = OTHER
    assert me.published_by_others() == [(1, REPLICA, [10, 12])]


def still() -> float:
    """A clock by which no heartbeat expires, even on a busy machine."""
    return 100.0


def hammer(path: str, worker: int, rounds: int) -> None:
    """A worker process that begins, ends and publishes as fast as it can; at the end nothing runs."""
    rows = SharedRows(Path(path), worker, still)
    for i in range(rounds):
        key = 1 + i % 8
        rows.begin(key, 10)
        rows.publish(key, worker, [key ^ worker << 32 ^ i << 8])
        rows.first_token(key, 10)
        rows.end(key)
        rows.served(key, 3)
        if i % 512 == 0:
            rows.beat()
    rows.beat()


@pytest.mark.slow
def test_concurrent_writers_are_read_consistently(tmp_path: Path) -> None:
    path, rounds = tmp_path / "rows", 20_000
    me = SharedRows(path, 0, still)
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=hammer, args=(str(path), i, rounds)) for i in (1, 2, 3)]
    for process in workers:
        process.start()
    received = 0
    last: dict[int, int] = {}
    while any(process.is_alive() for process in workers):
        me.beat()
        for key in range(1, 9):
            in_flight, tokens, _ = me.others(key)
            assert 0 <= in_flight <= 3
            assert 0 <= tokens <= 30
        for model, replica, hashes in me.published_by_others():
            for prefix in hashes:
                assert (prefix & 0xFF, prefix >> 32) == (model, replica)
                number = prefix >> 8 & 0xFFFFFF
                assert number > last.get(replica, -1)
                last[replica] = number
                received += 1
    for process in workers:
        process.join()
        assert process.exitcode == 0
    me.beat()
    received += sum(len(read) for read in reads(me))
    totals = [me.others(key) for key in range(1, 9)]
    assert totals == [(0, 0, 3 * rounds // 8)] * 8
    assert [me.served_by_others(key) for key in range(1, 9)] == [9 * rounds // 8] * 8
    assert received > RING_ENTRIES
    me.close()


def test_two_workers_of_one_number_take_two_rows(tmp_path: Path) -> None:
    """A lock of a row belongs to a process, so the second one is another process."""
    mine = SharedRows(tmp_path / "rows", 0)
    context = multiprocessing.get_context("fork")
    queue: multiprocessing.SimpleQueue[int] = context.SimpleQueue()
    child = context.Process(target=lambda: queue.put(SharedRows(tmp_path / "rows", 0).row))
    child.start()
    taken = queue.get()
    child.join()
    assert (mine.row, taken) == (0, 1)
    mine.close()
