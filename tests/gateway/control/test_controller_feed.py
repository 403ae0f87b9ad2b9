"""Catalogs that a worker takes from the controller's stream, or from disk without a controller."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.control.controller_feed import CatalogDecoder, catalog_feed
from gateway.intake.adapter_catalog import CatalogView
from gateway.intake.principal import Principal, WorkerTenant
from gateway.telemetry.structured_log import StructuredLog
from policy.config.deployment import AdaptersConfig, Deployment, ModelSpec
from policy.wire.adapter_catalog import Alias
from store.state_dir import StateDir
from tests.gateway.fake_replica import alias
from tests.gateway.worker import until

DIGEST = "d" * 64


class Site:
    """A worker's view, its source, and what it logged."""

    def __init__(self, root: Path) -> None:
        self.state = StateDir(root)
        self.logged = io.StringIO()
        self.view = CatalogView(lambda: 0)
        self.view.read(Deployment(models=(ModelSpec(name="alpha", adapters=AdaptersConfig()),)))
        self.source = catalog_feed(
            "127.0.0.1:9", self.state, self.view, StructuredLog(0, self.logged), connect_timeout_s=1.0
        )

    def publish(self, *names: str, epoch: float = 1.0, version: int = 1, term: int = 0) -> None:
        catalog: dict[str, Any] = {
            "term": term,
            "epoch": epoch,
            "version": version,
            "aliases": [alias(name, DIGEST) for name in names],
        }
        self.source.receive(msgspec.json.encode(catalog))

    def has(self, name: str) -> bool:
        return self.view.resolve(name, Principal(WorkerTenant("", b"")), None) is not None


@pytest.fixture
async def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


async def test_older_catalogs_are_ignored(site: Site) -> None:
    site.publish("one", version=2)
    site.publish("two", version=1)
    assert site.has("one") and not site.has("two")
    site.publish("three", version=3)
    assert site.has("three") and not site.has("one")
    site.publish("four", epoch=0.5, version=9)
    assert site.has("three")
    site.publish("five", epoch=2.0, version=1)
    assert site.has("five")


async def test_the_first_catalog_of_a_connection_is_always_taken(site: Site) -> None:
    site.publish("one", epoch=9.0, version=9)
    site.source.disconnected()
    site.publish("two", epoch=1.0)
    assert site.has("two")


async def test_what_a_deposed_controller_sends_is_never_taken(site: Site) -> None:
    site.publish("one", term=2)
    site.source.disconnected()
    site.publish("two", epoch=9.0, version=9, term=1)
    assert site.has("one") and not site.has("two")
    site.publish("three", term=3)
    assert site.has("three")


async def test_an_unchanged_catalog_does_not_rebuild_the_index(site: Site) -> None:
    site.publish("one")
    changed = site.view.changed
    site.publish("one")
    site.source.disconnected()
    site.publish("one")
    assert site.view.changed == changed


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
async def test_lines_are_joined_from_pieces_of_any_size(site: Site, size: int) -> None:
    taken = []
    for version in range(1, 5):
        names = [f"adapter-{version}-{i}" for i in range(version)]
        aliases = [alias(name, DIGEST) for name in names]
        taken.append(msgspec.json.encode({"epoch": 1.0, "version": version, "aliases": aliases}))
    stream = b"\n".join(taken) + b"\n\n" + taken[0] + b"\n" + taken[1][:20]
    for i in range(0, len(stream), size):
        site.source.stream.on_data(stream[i : i + size], complete=False)
    assert site.view.catalog.version == 4
    assert site.has("adapter-4-3") and not site.has("adapter-3-0")
    assert site.view.changed == 1 + 4


async def test_unreadable_lines_keep_the_last_catalog(site: Site) -> None:
    site.publish("one")
    for line in (b"{", b"{}", b'{"epoch":1,"version":1,"aliases":[{}]}', b"\xff"):
        site.source.receive(line)
    assert site.has("one")
    assert "catalog_line_unreadable" in site.logged.getvalue()


@pytest.mark.slow
async def test_the_last_catalog_is_on_disk_for_the_next_worker(site: Site, tmp_path: Path) -> None:
    site.publish("one")
    kept = asyncio.create_task(site.source.keep_on_disk())
    await until(site.state.catalog_path.exists)
    kept.cancel()
    assert (tmp_path / "catalog.json").stat().st_mode & 0o077 == 0
    later = Site(tmp_path)
    later.source.start_from_disk()
    assert later.has("one") and later.view.known
    later.publish()
    assert not later.has("one")


async def test_the_disk_does_not_replace_a_received_catalog(site: Site) -> None:
    site.state.save(site.state.catalog_path, site.view.catalog)
    site.publish("one")
    site.source.start_from_disk()
    assert site.has("one")


def test_unchanged_aliases_are_not_decoded_again() -> None:
    decoder = CatalogDecoder()

    def decode(*names: str, version: int) -> tuple[Alias, ...]:
        aliases = [alias(name, DIGEST) for name in names]
        return decoder.decode(
            msgspec.json.encode({"epoch": 1.0, "version": version, "aliases": aliases})
        ).aliases

    one, _ = decode("one", "two", version=1)
    assert decode("three", "one", version=2)[1] is one
    assert len(decode("three", version=3)) == len(decoder.aliases) == 1


async def test_a_corrupt_catalog_file_is_ignored(site: Site) -> None:
    site.state.ensure()
    site.state.catalog_path.write_bytes(b"{")
    site.source.start_from_disk()
    assert not site.view.known
    assert "catalog_file_unreadable" in site.logged.getvalue()
