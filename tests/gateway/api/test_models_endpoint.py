"""What ``/v1/models`` lists, and for whom."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.models_response import CARDS_A_TURN, KEPT, ModelsResponse, adapter_card
from gateway.intake.adapter_catalog import CatalogView
from gateway.intake.principal import Principal, WorkerTenant
from gateway.routing.discovered_server import external_replica
from gateway.routing.external_server_options import ServerAccess
from gateway.routing.fleet import FleetView
from gateway.routing.replica_handle import ReplicaHandle
from gateway.telemetry.metrics import WorkerMetrics
from policy.config.deployment import AdaptersConfig, Deployment, ModelSpec
from policy.types import EngineKind, FleetSnapshot, Model
from policy.wire.adapter_catalog import CatalogSnapshot
from tests.gateway.fake_replica import alias

OLD, NEW, OTHER = "a" * 64, "b" * 64, "c" * 64
DOCUMENT = Deployment(
    models=(
        ModelSpec(name="alpha", adapters=AdaptersConfig()),
        ModelSpec(name="beta", adapters=AdaptersConfig()),
        ModelSpec(name="theirs", engine=EngineKind.EXTERNAL, urls=("http://t:1",)),
    )
)
ANYONE, WEB, SHOP = (Principal(WorkerTenant(name, b"")) for name in ("", "web", "shop"))


class Site:
    """``made``: the cards of adapters that were made."""

    def __init__(self) -> None:
        self.made = Mock(side_effect=adapter_card)
        self.fleet = FleetView("", WorkerMetrics())
        self.catalog = CatalogView(lambda: 0)
        self.fleet.read_document(DOCUMENT)
        self.catalog.read(DOCUMENT)
        self.listing = ModelsResponse(self.fleet, self.catalog, self.made)

    def publish(self, *aliases: dict[str, Any]) -> None:
        self.catalog.take(
            msgspec.convert({"epoch": 1.0, "version": 1, "aliases": list(aliases)}, CatalogSnapshot)
        )

    async def ids(self, account: Principal = ANYONE) -> list[str]:
        listed = json.loads(await self.listing.all(account))
        assert listed["object"] == "list"
        return [card["id"] for card in listed["data"]]

    def one(self, name: str, account: Principal = ANYONE) -> Any:
        found = self.listing.one(name, account)
        return None if found is None else json.loads(found)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    site = Site()
    yield site
    site.fleet.close()


async def test_a_model_card_has_its_parent_and_the_digest_in_use(site: Site) -> None:
    site.publish(alias("sql", OLD, NEW, split=[(1, 5.0), (2, 95.0)]))
    card = site.one("sql")
    assert card == {
        "id": "sql",
        "object": "model",
        "created": 7,
        "owned_by": "tidegate",
        "root": NEW,
        "max_model_len": None,
        "parent": "alpha",
    }
    assert card in json.loads(await site.listing.all(ANYONE))["data"]
    assert site.one("alpha:sql") == {**card, "id": "alpha:sql"}
    assert site.one(f"sql@{OLD[:12]}") == {**card, "id": f"sql@{OLD[:12]}", "root": OLD}
    assert site.one(f"sql@{OTHER[:12]}") is None
    assert site.one("alpha")["parent"] is None


async def test_an_adapter_with_the_name_of_a_model_is_listed_qualified(site: Site) -> None:
    site.publish(alias("beta", OLD))
    assert await site.ids() == ["alpha", "beta", "theirs", "alpha:beta"]
    assert site.one("beta")["parent"] is None
    assert site.one("alpha:beta")["root"] == OLD


async def test_a_tenant_sees_only_its_adapters(site: Site) -> None:
    site.publish(
        alias("open", OLD),
        alias("web-only", OLD, tenants=["web"]),
        alias("both", OLD, tenants=["web", "shop"]),
    )
    for _ in range(2):
        assert (await site.ids(WEB))[3:] == ["open", "web-only", "both"]
        assert (await site.ids(SHOP))[3:] == ["open", "both"]
        assert (await site.ids())[3:] == ["open"]
    assert site.one("web-only", SHOP) is None
    assert site.one(f"web-only@{OLD}", SHOP) is None


async def test_a_list_follows_the_catalog_and_the_fleet(site: Site) -> None:
    site.publish(*(alias(f"adapter-{i}", OLD) for i in range(100)))
    assert len(await site.ids()) == 3 + 100
    site.publish(alias("sql", OLD))
    assert (await site.ids())[3:] == ["sql"]
    model = Model(name="alpha", engine=EngineKind.VLLM, max_model_len=2048)
    site.fleet.take(FleetSnapshot(epoch=1.0, version=1, at=0.0, models=(model,)), "controller", 1.0)
    assert site.one("sql")["max_model_len"] == 2048
    assert json.loads(await site.listing.all(ANYONE))["data"][3]["max_model_len"] == 2048


async def test_an_adapter_is_encoded_again_only_if_it_or_its_model_changed(site: Site) -> None:
    tenants = [Principal(WorkerTenant(f"tenant-{i}", b"")) for i in range(2 * KEPT)]
    aliases = [alias(f"adapter-{i}", OLD) for i in range(100)]
    aliases += [alias(f"own-{i}", OLD, tenants=[f"tenant-{i}"]) for i in range(2 * KEPT)]
    site.publish(*aliases)
    for _ in range(2):  # more kinds of clients than lists are kept
        for tenant in tenants:
            assert len(await site.ids(tenant)) == 3 + 101
    assert site.made.call_count == len(aliases)
    site.publish(*aliases[1:-1], alias("adapter-0", NEW))
    assert len(await site.ids()) == 3 + 100
    assert site.made.call_count == len(aliases) + 1
    model = Model(name="alpha", engine=EngineKind.VLLM, max_model_len=2048)
    site.fleet.take(FleetSnapshot(epoch=1.0, version=1, at=0.0, models=(model,)), "controller", 1.0)
    cards = json.loads(await site.listing.all(ANYONE))["data"][3:]
    assert {card["max_model_len"] for card in cards} == {2048}


ALIASES = st.lists(
    st.tuples(
        st.sampled_from(["alpha", "beta"]),
        st.sampled_from(["alpha", "sql", "web"]),
        st.sampled_from([OLD, NEW]),
        st.sampled_from([[], ["web"], ["shop"]]),
    ),
    unique_by=lambda each: each[:2],
)


@given(st.lists(ALIASES, max_size=6))
def test_lists_equal_those_of_a_new_encoder_after_any_changes(
    catalogs: list[list[tuple[str, str, str, list[str]]]],
) -> None:
    site = Site()

    async def compare() -> None:
        for account in (ANYONE, WEB, SHOP):
            plain = ModelsResponse(site.fleet, site.catalog)
            assert await site.listing.all(account) == await plain.all(account)

    for catalog in catalogs:
        site.publish(
            *(alias(name, digest, model=model, tenants=tenants) for model, name, digest, tenants in catalog)
        )
        asyncio.run(compare())


async def test_a_long_list_is_made_once_over_several_turns(site: Site) -> None:
    count = 3 * CARDS_A_TURN
    site.publish(*(alias(f"adapter-{i}", OLD) for i in range(count)))
    left = asyncio.create_task(site.ids())
    asked = asyncio.create_task(site.ids())
    turns = [0]
    while not asked.done():
        await asyncio.sleep(0)
        turns.append(site.made.call_count)
        left.cancel()
    assert len(asked.result()) == 3 + count
    assert site.made.call_count == count
    assert max(after - before for before, after in itertools.pairwise(turns)) <= CARDS_A_TURN


async def test_a_list_that_could_not_be_made_is_made_again(site: Site) -> None:
    site.publish(alias("sql", OLD))
    site.made.side_effect = RuntimeError("no card")
    with pytest.raises(RuntimeError, match="no card"):
        await site.ids()
    site.made.side_effect = adapter_card
    assert (await site.ids())[3:] == ["sql"]


async def test_the_number_of_cached_lists_is_bounded(site: Site) -> None:
    site.publish(*(alias(f"adapter-{i}", OLD, tenants=[f"tenant-{i}"]) for i in range(10 * KEPT)))
    for i in range(10 * KEPT):
        assert (await site.ids(Principal(WorkerTenant(f"tenant-{i}", b""))))[3:] == [f"adapter-{i}"]
    assert len(site.listing._made) <= KEPT


async def test_adapters_of_external_servers_are_listed(site: Site) -> None:
    replica = external_replica("theirs", "http://t:1", adapters=("style",), at=0.0)
    site.fleet.set_external("theirs", [(replica, ServerAccess())], None)
    assert await site.ids() == ["alpha", "beta", "theirs", "style"]
    assert site.one("style")["parent"] == site.one("theirs:style")["parent"] == "theirs"
    site.publish(alias("sql", OLD))
    assert await site.ids() == ["alpha", "beta", "theirs", "style", "sql"]


async def test_adapters_loaded_by_replicas_are_not_listed_by_their_engine_name(site: Site) -> None:
    replica = external_replica("alpha", "http://a:1", adapters=(), at=0.0)
    handle = ReplicaHandle(replica, 1.0, "secret")
    handle.adapters.update((f"sql@{OLD[:12]}",), ())
    served = site.fleet.get("alpha")
    assert served is not None
    served.handles.append(handle)
    assert await site.ids() == ["alpha", "beta", "theirs"]
    assert site.one(f"sql@{OLD[:12]}") is None
    assert site.fleet.listing(f"sql@{OLD[:12]}") is None
