"""External servers are probed, unless their answers show their health; a reason says what is wrong."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from pathlib import Path
from typing import Any, cast

import pytest

from gateway.http.http1_client import ConnectionPool
from gateway.routing.external_server_options import ServerAccess
from gateway.routing.external_server_poller import MAX_LISTING, ExternalPoller, PollTimes
from gateway.routing.fleet import FleetView
from gateway.telemetry.structured_log import StructuredLog
from policy.config.deployment import Deployment, ModelSpec
from policy.deployment_file.parse import parse
from policy.routing.concurrency_limit import ServerQueue
from policy.scaling.reconcile_steps import LayerKey
from policy.types import EngineKind, Replica, ReplicaPhase
from tests.gateway.certificate import certify
from tests.gateway.fake_replica import Exchange
from tests.gateway.fake_upstream import FakeUpstream
from tests.ports import free_ports

TURNS = 6
LISTING = json.dumps(
    {"data": [{"id": "alpha", "max_model_len": 64}, {"id": "sql", "parent": "alpha"}]}
).encode()


class View:
    """A fleet with one server, with ``growth`` more answers at each check."""

    def __init__(self, growth: int = 0, turns: int = 1) -> None:
        self.growth = growth
        self.total = 0
        self.turns: list[tuple[Replica, ServerAccess, int | None]] = []
        self.enough = asyncio.Event()
        self._turns = turns

    def reads(self, model: str, url: str) -> int:
        self.total += self.growth
        return self.total

    def layer_of(self, model: str, replica: str) -> LayerKey | None:
        return None

    def is_answering(self, model: str, url: str) -> bool:
        return bool(self.turns) and self.turns[-1][0].state is ReplicaPhase.READY

    def learns_bound(self, model: str, url: str) -> bool:
        return False

    def set_external(
        self, name: str, servers: list[tuple[Replica, ServerAccess]], max_model_len: int | None
    ) -> None:
        ((replica, access),) = servers
        self.turns.append((replica, access, max_model_len))
        if len(self.turns) == self._turns:
            self.enough.set()


class Busy(View):
    """A fleet whose server has requests in flight; its first ``queues`` are enough."""

    def __init__(self) -> None:
        super().__init__(turns=-1)
        self.queues: list[ServerQueue | None] = []

    def learns_bound(self, model: str, url: str) -> bool:
        return not self.queues

    def learn_bound(self, model: str, url: str, queue: ServerQueue | None) -> None:
        self.queues.append(queue)
        self.enough.set()


AT_ONCE = PollTimes(probe_every_s=0.0)


async def probe(view: View, server: str | dict[str, Any], times: PollTimes = AT_ONCE, **more: Any) -> None:
    """Probe the only server of the model "alpha", with ``more`` keys, as often as ``view`` wants."""
    await probe_models(
        view, parse({"models": [{"name": "alpha", "engine": "external", "urls": [server]} | more]}), times
    )


async def probe_models(view: View, document: Deployment, times: PollTimes = AT_ONCE) -> None:
    task = asyncio.create_task(
        ExternalPoller(cast("FleetView", view), lambda: document, StructuredLog(0), times).run()
    )
    async with asyncio.timeout(60):
        await view.enough.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def serving(*answers: tuple[int, bytes], tls: ssl.SSLContext | None = None) -> FakeUpstream:
    """A server that gives these answers, and repeats the last."""
    server = FakeUpstream(tls)

    async def answer(exchange: Exchange) -> None:
        assert exchange.path == "/v1/models"
        status, body = answers[min(len(server.hits), len(answers)) - 1]
        await exchange.reply(body, status=status)

    server.answer = answer
    await server.start()
    return server


@pytest.mark.parametrize(
    ("growth", "list_every_s", "asked"),
    [(0, 60.0, TURNS), (1, 60.0, 1), (1, 0.0, TURNS)],
    ids=["it answers no request", "it answers requests", "what is new there is due"],
)
async def test_a_server_is_probed_unless_its_answers_show_that_it_is_up(
    growth: int, list_every_s: float, asked: int
) -> None:
    view, server = View(growth, TURNS), await serving((200, LISTING))
    await probe(view, f"{server.url}/v1", AT_ONCE._replace(list_every_s=list_every_s))
    await server.stop()
    assert len(server.hits) == asked
    for replica, access, length in view.turns:
        assert (replica.url, replica.state, replica.adapters) == (server.url, ReplicaPhase.READY, ("sql",))
        assert (access, length) == (ServerAccess(), 64)


async def test_a_server_has_the_shape_and_adapters_that_it_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = await serving((200, LISTING))
    shapes = {"big": {"gpus": 2, "tensor_parallel": 2, "max_in_flight": 9}, "small": {"gpus": 1}}
    given = {"url": server.url, "shape": "big", "adapters": ["sql", "chat"]}
    view, wrong = View(), View(turns=3)
    await probe(view, given, shapes=shapes, modes={"one": {"shape": "big"}})
    ((replica, access, _),) = view.turns
    assert (replica.shape, replica.mode, replica.adapters) == ("big", "one", ("sql", "chat"))
    assert access.max_in_flight == 9
    # It serves, with what is wrong in its status, and once in the log.
    path = tmp_path / "servers.json"
    path.write_text(json.dumps([given | {"shape": "huge"}]))
    await probe(wrong, "", urls=[], shapes=shapes, discovery={"file": str(path)})
    await server.stop()
    replica, access, _ = wrong.turns[1]
    problem = f"{path}: {server.url}: shape: got 'huge', expected one of the shapes: big, small"
    assert (replica.state, replica.shape, replica.reason) == (ReplicaPhase.READY, "external", problem)
    logged = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(each["event"], each["problem"]) for each in logged] == [("server_metadata_invalid", problem)]


async def test_a_failed_probe_is_repeated() -> None:
    view = View(1, TURNS)
    server = await serving(
        (503, b""), (200, b'{"data":[{"id":"\xff"}]}'), (200, b"[" * 100_000), (200, LISTING)
    )
    await probe(view, server.url)
    await server.stop()
    stopped, ready = ReplicaPhase.STOPPED, ReplicaPhase.READY
    assert [replica.state for replica, _, _ in view.turns] == [stopped] * 3 + [ready] * 3


async def test_a_host_that_httpx_does_not_take_is_not_served() -> None:
    """It ended the worker, and each that took its place."""
    view, busy = View(), Busy()
    await probe(view, "http://xn--ls8h:1")
    assert view.turns[0][0].state is ReplicaPhase.STOPPED
    assert "not allowed" in view.turns[0][0].reason
    await probe(busy, "http://xn--ls8h:1", AT_ONCE._replace(read_every_s=0.0))
    assert busy.queues == [None]
    # Checks of the deployment file refuse such an address, but nobody checks those of found servers.
    found = Deployment(
        models=(ModelSpec("alpha", engine=EngineKind.EXTERNAL, urls=("http://10.0.0.256:1",)),)
    )
    view = View()
    await probe_models(view, found)
    assert view.turns[0][0].reason == "Invalid IPv4 address: '10.0.0.256'"


@pytest.mark.slow
async def test_a_server_is_down_after_two_late_answers_in_a_row() -> None:
    late = {2, 4, 5}  # the first time after an answer, and then twice in a row
    server = FakeUpstream()

    async def answer(exchange: Exchange) -> None:
        if len(server.hits) not in late:
            await exchange.reply(LISTING)

    server.answer = answer
    await server.start()
    view = View(turns=TURNS)
    await probe(view, server.url, AT_ONCE._replace(probe_timeout_s=0.3))
    await server.stop()
    stopped, ready = ReplicaPhase.STOPPED, ReplicaPhase.READY
    assert [replica.state for replica, _, _ in view.turns] == [ready] * 4 + [stopped, ready]


OTHERS = json.dumps({"data": [{"id": name} for name in "bcdefghi"]}).encode()


@pytest.mark.parametrize(
    ("more", "status", "body", "reason"),
    [
        ({}, 200, LISTING, ""),
        ({"model": "b"}, 200, OTHERS, ""),
        ({}, 200, OTHERS,
         "does not serve 'alpha', but 'b', 'c', 'd', 'e', 'f' and 3 more: set the server's `model`"),
        ({}, 200, b'{"data":[]}', "does not serve 'alpha', but no model: set the server's `model`"),
        ({}, 401, b"{}", "answers 401: it wants an API key: set key_file or key_env"),
        ({"key_env": "KEY"}, 403, b"{}", "answers 403: it refuses the API key of KEY"),
        ({"key_env": "NO_KEY"}, 200, LISTING, "the environment variable NO_KEY is not set"),
        ({"key_file": "/nowhere"}, 200, LISTING, "the key file cannot be read: No such file or directory"),
        ({}, 500, b"", "answers 500 to GET /v1/models"),
        ({}, 200, b"<html>", "its answer to GET /v1/models is not a list of models"),
        ({}, 200, b" " * (MAX_LISTING + 1),
         f"its answer to GET /v1/models has more than {MAX_LISTING} bytes"),
    ],
)  # fmt: skip
async def test_a_server_that_does_not_serve_the_model_has_a_reason(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, str], status: int, body: bytes, reason: str
) -> None:
    monkeypatch.setenv("KEY", "sk-1")
    server, view = await serving((status, body)), View()
    await probe(view, {"url": server.url, **more})
    await server.stop()
    ((replica, _, _),) = view.turns
    assert (replica.reason, replica.state is ReplicaPhase.READY) == (reason, not reason)


async def test_a_server_that_gives_no_answer_has_a_reason() -> None:
    view = View()
    await probe(view, f"http://127.0.0.1:{free_ports(1)[0]}")
    assert view.turns[0][0].reason == "connection refused"


async def test_the_key_is_sent_and_the_certificate_verified_by_its_own_file(tmp_path: Path) -> None:
    certificate, key_file = tmp_path / "ca.pem", tmp_path / "key"
    key_file.write_text("sk-1\n")
    server = await serving((200, OTHERS), tls=certify(certificate))
    trusts, doubts, broken = View(), View(), View()
    entry = {"url": server.url, "model": "c", "key_file": str(key_file)}
    await probe(trusts, {**entry, "ca_file": str(certificate)})
    await probe(doubts, entry)
    await probe(broken, {**entry, "ca_file": str(key_file)})
    await server.stop()
    ((replica, access, _),) = trusts.turns
    assert (replica.reason, replica.id) == ("", f"127.0.0.1:{server.port}")
    assert access == ServerAccess(b"sk-1", str(certificate), "c", certificate.stat().st_mtime_ns)
    assert [hit.headers.get("authorization") for hit in server.hits] == ["Bearer sk-1"]
    assert "certificate is not trusted" in doubts.turns[0][0].reason
    assert "TLS" in broken.turns[0][0].reason


GAUGES = "vllm:num_requests_running{0} {1}\nvllm:num_requests_waiting{0} {2}\n"


@pytest.mark.parametrize(
    ("metrics", "queue"),
    [
        (GAUGES.format("", "3.0", "1"), ServerQueue(3.0, 1.0)),
        (2 * GAUGES.format('{engine="0",model_name="a}b"}', "1e1", "2.5e+01"), ServerQueue(20.0, 50.0)),
        ("vllm:num_requests_running 1\n", None),
        (GAUGES.format("", "1.2.3", "0"), None),
        (GAUGES.format("", "1e999", "0"), None),
        (GAUGES.format("", "NaN", "+Inf"), None),
        (GAUGES.format("", "9" * 400, "0"), None),
        ("vllm:num_requests_running{" * 40_000, None),
    ],
    ids=["plain", "two engines", "one gauge", "no number", "overflow", "not finite", "too long", "one line"],
)
async def test_a_queue_is_read_from_well_formed_metrics_alone(
    metrics: str, queue: ServerQueue | None
) -> None:
    view, server = Busy(), FakeUpstream()

    async def answer(exchange: Exchange) -> None:
        await exchange.reply(metrics.encode() if exchange.path == "/metrics" else LISTING)

    server.answer = answer
    await server.start()
    await probe(view, server.url, PollTimes(read_every_s=0.01))
    await server.stop()
    assert view.queues == [queue]


async def test_a_renewed_certificate_file_is_read_again(tmp_path: Path) -> None:
    certificate = tmp_path / "ca.pem"
    server = await serving((200, LISTING), tls=certify(certificate))
    renewed = certificate.read_bytes()
    certify(certificate)
    pool = ConnectionPool(server.url, 60.0)

    class Renewing(View):
        def set_external(
            self, name: str, servers: list[tuple[Replica, ServerAccess]], max_model_len: int | None
        ) -> None:
            super().set_external(name, servers, max_model_len)
            if len(self.turns) == 1:
                certificate.write_bytes(renewed)
                os.utime(certificate, ns=(1, 1))

    former = certificate.stat().st_mtime_ns
    pool.trust(str(certificate), former)
    with pytest.raises(ssl.SSLCertVerificationError):
        await pool.connect()
    view = Renewing(turns=2)
    await probe(view, {"url": server.url, "ca_file": str(certificate)})
    (before, doubted, _), (after, trusted, _) = view.turns[:2]
    assert ("certificate is not trusted" in before.reason, after.reason) == (True, "")
    assert (doubted.ca_changed_ns, trusted.ca_changed_ns) == (former, 1)
    pool.trust(str(certificate), trusted.ca_changed_ns)
    (await pool.connect()).kill()
    await server.stop()
