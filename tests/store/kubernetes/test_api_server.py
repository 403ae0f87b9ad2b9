"""Objects that are followed by list and watch, while the API server fails in its ways."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import pytest

from store.kubernetes import api_server
from store.kubernetes.api_server import AccountToken, ObjectMetadata, ObjectWatch, retry_after_s
from store.kubernetes.engine_pod_labels import replica_id
from tests.gateway.fake_replica import Exchange
from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.worker import until
from tests.kubernetes_api import PODS, KubernetesApi


class Pod(msgspec.Struct):
    metadata: ObjectMetadata


@pytest.fixture
async def api(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KubernetesApi]:
    monkeypatch.setattr(api_server, "RETRY_S", 0.01)
    monkeypatch.setattr(api_server, "MAX_RETRY_S", 0.05)
    made = KubernetesApi()
    await made.start()
    yield made
    await made.stop()


def watching(api: KubernetesApi | FakeUpstream, errors: list[Exception]) -> ObjectWatch[Pod]:
    query = {"labelSelector": "app=vllm"}
    watch = ObjectWatch(api.url, PODS, query, Pod, on_change=lambda: None, failed=errors.append)
    watch.start()
    return watch


@pytest.mark.parametrize("status", [403, 429, 500])
async def test_a_watch_that_is_refused_is_reported_once_and_tried_again(
    api: KubernetesApi, status: int
) -> None:
    api.refuses = lambda asked: status if "watch=1" in asked else 0
    errors: list[Exception] = []
    watch = watching(api, errors)
    await until(lambda: len(api.paths) > 8, "it is tried again")
    assert [error.response.status_code for error in errors if isinstance(error, httpx.HTTPStatusError)] == [
        status
    ]
    api.refuses = lambda asked: 0
    api.put_pod("a")
    await until(lambda: "a" in (watch.objects or {}), "it follows")
    # The next failure is another one, after what came by a watch.
    api.put_pod("b")
    await until(lambda: "b" in (watch.objects or {}), "it has recovered")
    api.refuses = lambda asked: status
    api.cut()
    await until(lambda: len(errors) > 1, "it is reported")
    await watch.close()


async def test_a_version_that_was_forgotten_is_no_failure(api: KubernetesApi) -> None:
    refused = [410, 410]
    api.refuses = lambda asked: refused.pop() if "watch=1" in asked and refused else 0
    api.forgotten = 2
    errors: list[Exception] = []
    watch = watching(api, errors)
    await until(lambda: not refused and not api.forgotten, "the watch was refused")
    api.put_pod("a")
    await until(lambda: "a" in (watch.objects or {}), "it follows")
    assert errors == []
    await watch.close()


async def test_a_list_without_items_is_empty() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.reply(b'{"metadata": {"resourceVersion": "1"}, "items": null}')

    server = FakeUpstream()
    server.answer = answer
    await server.start()
    watch = watching(server, [])
    await watch.listed.wait()
    assert watch.objects == {}
    await watch.close()
    await server.stop()


def test_the_token_is_read_again_for_each_request(tmp_path: Path) -> None:
    account = AccountToken(tmp_path)
    for token in ("first", "renewed"):
        (tmp_path / "token").write_text(f"{token}\n")
        sent = next(account.sync_auth_flow(httpx.Request("GET", "https://h")))
        assert sent.headers["authorization"] == f"Bearer {token}"


def test_how_long_the_api_server_asks_to_wait() -> None:
    def waits_s(given: str) -> float:
        answer = httpx.Response(429, headers={"retry-after": given}, request=httpx.Request("GET", "http://h"))
        with pytest.raises(httpx.HTTPStatusError) as raised:
            answer.raise_for_status()
        return retry_after_s(raised.value)

    assert [waits_s(given) for given in ("3", "900", "soon")] == [3.0, api_server.MAX_RETRY_S, 0.0]
    assert retry_after_s(httpx.ConnectError("no")) == 0.0


def test_a_name_that_comes_back_is_another_replica() -> None:
    assert replica_id("vllm-0", "12345678-abcd") == "vllm-0-12345678"
    assert replica_id("vllm-5d4f-x2x9z", "12345678-abcd") == "vllm-5d4f-x2x9z"
    assert replica_id("vllm-0", "") == "vllm-0"
