"""What clients may have sent of unfinished requests: who is read, who waits, and who is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http.upload_budget import MIN_RATE, MOST_AT_ONCE, READ_BYTES, PendingBody, Upload, UploadBudget
from gateway.protocol.errors import Refused

LIMIT = 100 * READ_BYTES
HERE, THERE = ("192.0.2.1", 1), ("192.0.2.2", 1)


class Client:
    """A connection with a body of ``reads`` reads; ``status`` is that of its refusal."""

    def __init__(self, budget: UploadBudget, reads: int = 40, peer: object = HERE) -> None:
        self.is_read = True
        self.status = 0
        self.left = reads * READ_BYTES
        self.held = 0
        self._budget, self._peer = budget, peer
        self.upload = budget.begin(self, peer)
        self.pending: PendingBody | None = None

    def send(self, reads: float, *, pending: bool = False) -> None:
        """Send as much as is read of this many reads; the app has it at once unless ``pending``."""
        while reads > 0 and self.left and self.is_read and not self.status:
            size = min(self.left, int(READ_BYTES * min(1, reads)))
            self.held, self.left, reads = self.held + size, self.left - size, reads - 1
            self._budget.hold(self.upload, self.held, self.left)
        if not self.left and self.held:
            if pending:
                self.pending = self._budget.keep(self._peer, self.held)
            self.held = 0
            self._budget.end(self.upload)

    def hold_back(self) -> None:
        assert self.is_read
        self.is_read = False

    def read_on(self) -> None:
        assert not self.is_read
        self.is_read = True

    def shed(self, refused: Refused) -> None:
        self.status, self.held = refused.status, 0


@pytest.fixture
def budget() -> UploadBudget:
    return UploadBudget(lambda: (LIMIT, LIMIT * 3 // 4))


def test_stalled_uploads_within_half_of_the_budget_are_left_alone(budget: UploadBudget) -> None:
    client = Client(budget)
    client.send(30)
    for _ in range(9):
        budget.sweep(1.0)
    assert (client.is_read, client.status) == (True, 0)


def test_a_stalled_upload_gives_way_to_a_newcomer_at_once(budget: UploadBudget) -> None:
    stalled, sending = Client(budget), Client(budget, peer=THERE)
    stalled.send(30)
    for _ in range(3):
        budget.sweep(1.0)
        sending.send(MIN_RATE / READ_BYTES)
    newcomer = Client(budget, 38, peer=THERE)
    newcomer.send(37)
    assert (stalled.status, sending.status, newcomer.left) == (408, 0, READ_BYTES)


def test_new_uploads_wait_for_a_stalled_one_for_two_sweeps_at_most(budget: UploadBudget) -> None:
    stalled, newcomer = Client(budget, 38), Client(budget, 39, peer=THERE)
    stalled.send(37.9)
    newcomer.send(20)
    assert (stalled.status, newcomer.is_read) == (0, False)
    budget.sweep(1.0)
    budget.sweep(1.0)
    assert (stalled.status, newcomer.is_read) == (408, True)


def test_beyond_the_budget_those_with_the_most_left_are_refused() -> None:
    budget = UploadBudget(lambda: (LIMIT, LIMIT))
    short = Client(budget, 2)
    short.send(1)
    clients = [Client(budget, 40 + i) for i in range(120)]
    for client in clients:
        client.send(1)
    assert [client.status for client in clients] == [0] * 99 + [503] * 21
    assert (short.is_read, short.status) == (True, 0)


def test_an_address_has_a_budget_of_its_own(budget: UploadBudget) -> None:
    crowd = [Client(budget, peer=(f"2001:db8::{i:x}", 1, 0, 0)) for i in range(90)]
    for client in crowd:
        client.send(1)
    assert sum(client.status == 503 for client in crowd) == 15
    other = Client(budget, 25, peer=("2001:db8:0:1::1", 1, 0, 0))
    other.send(24)
    assert (other.left, other.status) == (READ_BYTES, 0)


def test_of_many_stalled_uploads_some_are_refused_at_a_time() -> None:
    budget = UploadBudget(lambda: (LIMIT, LIMIT))
    clients = [Client(budget, peer=(f"192.0.2.{i // 2}", 1)) for i in range(400)]
    for client in clients:
        client.send(0.25)
    refused = []
    for _ in range(4):
        budget.sweep(1.0)
        refused.append(sum(client.status == 408 for client in clients))
    assert refused[1] == MOST_AT_ONCE < refused[2]


def test_when_many_uploads_end_at_once_the_others_go_on_together() -> None:
    due: list[Callable[[], None]] = []
    budget = UploadBudget(lambda: (LIMIT, LIMIT), due.append)
    clients = [Client(budget, 2) for _ in range(70)]
    for client in clients:
        client.send(1)
    waiting = [client for client in clients if not client.is_read]
    for client in clients:
        client.send(1)
    assert len(waiting) == 20 and len(due) == 1
    due.pop()()
    assert all(client.is_read for client in waiting)


class Uploads(dict[Upload, None]):
    """Open uploads, which count how often they were looked through."""

    looks = 0

    def __iter__(self) -> Iterator[Upload]:
        self.looks += 1
        return super().__iter__()


def test_an_end_looks_at_no_other_upload_while_none_waits(budget: UploadBudget) -> None:
    clients = [Client(budget) for _ in range(10)]
    shares = (clients[0].upload.everyone, clients[0].upload.own)
    for share in shares:
        share.uploads = Uploads(share.uploads)
    for client in clients[:3]:
        budget.end(client.upload)
    assert [share.uploads.looks for share in shares] == [0, 0]


def test_those_that_are_read_when_the_half_is_reached_exceed_it_by_little() -> None:
    budget = UploadBudget(lambda: (LIMIT, LIMIT))
    large, crowd = Client(budget, 99), [Client(budget, 90) for _ in range(40)]
    large.send(46)
    for size in (0.05, 1, 1):
        for client in crowd:
            client.send(min(size, client.upload.read_size() / READ_BYTES))
    assert not any(client.is_read for client in crowd[1:])
    assert LIMIT / 2 < large.held + sum(client.held for client in crowd) < 0.56 * LIMIT


@pytest.mark.parametrize("peer", [HERE, None])
def test_when_the_one_that_goes_on_is_refused_another_goes_on(peer: object) -> None:
    budget = UploadBudget(lambda: (LIMIT, LIMIT))
    clients = []
    for number in range(200):  # all have the same left to send, and the oldest are refused
        clients.append(Client(budget, peer=peer or (f"192.0.2.{number}", 1)))
        clients[-1].send(1)
    there = [client for client in clients if not client.status]
    assert len(there) == 100
    while rest := [client for client in there if client.left and not client.status]:
        assert any(client.is_read for client in rest)
        for client in rest:
            client.send(1)
    assert sum(not client.status for client in there) > 50


def test_few_go_on_at_a_time_in_large_reads() -> None:
    budget = UploadBudget(lambda: (LIMIT, LIMIT))
    first, crowd = Client(budget, 49), [Client(budget, 60) for _ in range(90)]
    first.send(48)
    for client in crowd:
        client.send(0.1)
    waiting = [client for client in crowd if not client.is_read]
    first.send(1)
    assert 5 < sum(client.is_read for client in waiting) < 15


@pytest.mark.parametrize("peer", [HERE, THERE], ids=["of its address", "of another address"])
def test_when_the_first_ends_the_next_goes_on_at_once(peer: object) -> None:
    """Nothing is read in the meantime: of hundreds that are read one after the other each would wait."""
    due: list[Callable[[], None]] = []
    budget = UploadBudget(lambda: (LIMIT, LIMIT), due.append)
    stalled, next_one, first = Client(budget, 120, peer), Client(budget, 60, peer), Client(budget, 9)
    stalled.send(48)
    next_one.send(4)
    first.send(8)
    assert (next_one.is_read, first.is_read) == (False, True)
    first.send(1)
    assert not first.left
    assert next_one.is_read and not due


def test_complete_bodies_are_held_until_the_app_reads_them(budget: UploadBudget) -> None:
    """150 clients with a body each, one after the other: a reader that is alone was never held back."""
    clients: list[Client] = []
    while not clients or clients[-1].is_read:
        clients.append(Client(budget, 10))
        clients[-1].send(10, pending=True)
    waiting = clients.pop()
    assert len(clients) * 10 * READ_BYTES <= LIMIT
    for client in clients:
        assert client.pending is not None
        budget.release(client.pending)
    assert waiting.is_read
    waiting.send(10)
    assert not any(client.status for client in [*clients, waiting])


def test_complete_bodies_of_one_address_hold_no_other_address_back(budget: UploadBudget) -> None:
    own = [Client(budget, 10) for _ in range(4)]
    for client in own:
        client.send(10, pending=True)
    late, other = Client(budget, 10), Client(budget, 5, THERE)
    late.send(1)
    other.send(5)
    assert (late.is_read, other.left, other.is_read) == (False, 0, True)


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=60), st.integers(1, 40))
def test_all_are_served_within_the_budget_while_the_app_reads_one_at_a_time(
    bodies: list[tuple[int, bool]], burst: int
) -> None:
    budget = UploadBudget(lambda: (LIMIT, LIMIT * 3 // 4))
    clients = [Client(budget, reads, HERE if here else THERE) for reads, here in bodies]
    for _ in range(1000):
        for client in clients:
            client.send(burst, pending=True)
            pending = sum(each.pending.size for each in clients if each.pending)
            assert sum(each.held for each in clients) + pending <= LIMIT
        budget.sweep(0.0)
        for client in clients:
            if client.pending is not None:
                budget.release(client.pending)
                client.pending = None
                break
        if not any(client.left or client.pending for client in clients):
            break
    assert not any(client.left or client.status for client in clients)


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=60), st.integers(1, 40))
def test_all_that_send_are_served_within_the_budget(bodies: list[tuple[int, bool]], burst: int) -> None:
    budget = UploadBudget(lambda: (LIMIT, LIMIT * 3 // 4))
    clients = [Client(budget, reads, HERE if here else THERE) for reads, here in bodies]
    for _ in range(1000):
        for client in clients:
            client.send(burst)
            assert sum(each.held for each in clients) <= LIMIT
        budget.sweep(0.0)
        if not any(client.left for client in clients):
            break
    assert not any(client.left or client.status for client in clients)
