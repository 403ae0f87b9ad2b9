"""Which version a requested name resolves to, and for which tenants."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from gateway.intake.adapter_catalog import CatalogView
from gateway.intake.principal import Principal, WorkerTenant
from policy.config.deployment import AdaptersConfig, Deployment, ModelSpec
from policy.config.tenancy import AccessPolicy
from policy.hashing import hash_name
from policy.types import EngineKind
from policy.wire.adapter_catalog import CatalogSnapshot
from tests.gateway.fake_replica import alias

OLD, NEW, OTHER = "a" * 64, "b" * 64, "c" * 64
ANYONE, WEB, SHOP, ADMIN = (Principal(WorkerTenant(name, b"")) for name in ("", "web", "shop", "boss"))
ADMIN.account.admin = True
MODELS = (
    ModelSpec(name="alpha", adapters=AdaptersConfig()),
    ModelSpec(name="org/beta", adapters=AdaptersConfig()),
    ModelSpec(name="theirs", engine=EngineKind.EXTERNAL),
)


def catalog(*aliases: dict[str, Any]) -> CatalogSnapshot:
    return msgspec.convert({"epoch": 1.0, "version": 1, "aliases": list(aliases)}, CatalogSnapshot)


def view(*aliases: dict[str, Any], draw: Callable[[], int] = lambda: 7) -> CatalogView:
    made = CatalogView(draw)
    made.read(Deployment(models=MODELS))
    made.take(catalog(*aliases))
    return made


def digest(
    made: CatalogView, name: str, account: Principal = ANYONE, session: bytes | None = None
) -> str | None:
    found = made.resolve(name, account, session)
    return None if found is None else f"{found.model}/{found.digest[0]}"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("sql", "alpha/b"),
        ("alpha:sql", "alpha/b"),
        ("org/beta:sql", "org/beta/c"),
        (f"sql@{OLD}", "alpha/a"),
        (f"sql@{OLD[:12]}", "alpha/a"),
        (f"alpha:sql@{OLD[:40]}", "alpha/a"),
        (f"sql@{OTHER[:12]}", "org/beta/c"),
        (f"alpha:sql@{OTHER[:12]}", None),
        (f"sql@{OLD[:11]}", None),
        (f"sql@{OLD.upper()}", None),
        (f"sql@{OLD}0", None),
        ("sql@", None),
        ("@", None),
        ("", None),
        ("alpha", None),
        ("alpha:", None),
        (":sql", None),
        ("gamma:sql", None),
        ("sql@x@" + OLD, None),
        ("SQL", None),
    ],
)
def test_names_with_base_and_digest_resolve_to_a_version(name: str, found: str | None) -> None:
    made = view(alias("sql", OTHER, model="org/beta"), alias("sql", OLD, NEW))
    assert digest(made, name) == found


@pytest.mark.parametrize("name", ["sql", "alpha:sql", f"sql@{NEW[:12]}", f"alpha:sql@{NEW}"])
def test_a_hidden_adapter_does_not_resolve_by_any_name(name: str) -> None:
    made = view(alias("sql", OLD, NEW, tenants=["web"]))
    assert digest(made, name, WEB) == digest(made, name, ADMIN) == "alpha/b"
    assert digest(made, name, SHOP) is None
    assert digest(made, name, ANYONE) is None


def test_a_hidden_adapter_does_not_hide_others_of_its_name() -> None:
    made = view(alias("sql", OLD, tenants=["web"]), alias("sql", OTHER, model="org/beta"))
    assert digest(made, "sql", WEB) == "alpha/a"
    assert digest(made, "sql", SHOP) == "org/beta/c"
    assert digest(made, f"sql@{OTHER[:12]}", SHOP) == "org/beta/c"


@pytest.mark.parametrize(
    ("tenant", "key", "found"),
    [
        (["sql"], ["alpha:sql"], "alpha/a"),
        (["alpha:sql", "x"], ["sql", "y"], "alpha/a"),
        (["org/beta:sql"], ["sql"], "org/beta/c"),
        (["sql"], ["org/beta:sql"], "org/beta/c"),
        (["sql"], [], "alpha/a"),
        ([], ["org/beta:sql"], "org/beta/c"),
        (["alpha:sql"], ["org/beta:sql"], None),
        (["sql"], ["x"], None),
    ],
)
def test_an_adapter_that_tenant_and_key_allow_in_either_form_resolves(
    tenant: list[str], key: list[str], found: str | None
) -> None:
    made = view(alias("sql", OTHER, model="org/beta"), alias("sql", OLD))
    access = AccessPolicy(adapters=tuple(tenant)), AccessPolicy(adapters=tuple(key))
    principal = Principal(WorkerTenant("web", b""), "key-1", access)
    assert digest(made, "sql", principal) == found
    assert [f"{each.alias.model}/{each.main.digest[0]}" for each in made.visible(principal)][:1] == (
        [] if found is None else [found]
    )


def test_the_order_of_models_decides_between_equal_names() -> None:
    made = view(alias("sql", OTHER, model="org/beta"), alias("sql", OLD))
    assert digest(made, "sql") == "alpha/a"
    made.read(Deployment(models=MODELS[::-1]))
    assert digest(made, "sql") == "org/beta/c"


def test_a_split_follows_its_weights_and_keeps_each_client_where_it_is() -> None:
    made = view(alias("sql", OLD, NEW, split=[(1, 95.0), (2, 5.0)]), draw=itertools.count().__next__)
    sessions = [b"session-%d" % i for i in range(2000)]
    first = [digest(made, "sql", WEB, session) for session in sessions]
    assert first == [digest(made, "alpha:sql", SHOP, session) for session in sessions]
    assert 0.03 < Counter(first)["alpha/b"] / len(first) < 0.07
    tenants = [Principal(WorkerTenant(f"tenant-{i}", b"")) for i in range(2000)]
    by_tenant = [digest(made, "sql", tenant) for tenant in tenants]
    assert by_tenant == [digest(made, "sql", tenant) for tenant in tenants]
    assert 0.03 < Counter(by_tenant)["alpha/b"] / len(by_tenant) < 0.07


def test_anonymous_requests_without_a_session_are_split_at_random() -> None:
    made = view(
        alias("sql", OLD, NEW, split=[(1, 1.0), (2, 1.0)]),
        draw=(hash_name(str(i)) for i in range(400)).__next__,
    )
    drawn = Counter(digest(made, "sql") for _ in range(400))
    assert set(drawn) == {"alpha/a", "alpha/b"}
    assert 140 < drawn["alpha/a"] < 260


def test_a_pinned_version_ignores_the_split() -> None:
    made = view(alias("sql", OLD, NEW, split=[(2, 1.0)]))
    assert {digest(made, f"sql@{OLD[:12]}", WEB, b"%d" % i) for i in range(20)} == {"alpha/a"}


def test_an_ambiguous_digest_prefix_pins_no_version() -> None:
    twin = NEW[:20] + "0" * 44
    made = view(alias("sql", NEW, twin))
    assert digest(made, f"sql@{NEW[:20]}") is None
    assert digest(made, f"sql@{NEW[:21]}") == "alpha/b"


def test_versions_with_equal_content_are_one() -> None:
    made = view(alias("sql", OLD, NEW, OLD))
    assert digest(made, f"sql@{OLD[:12]}") == digest(made, "sql") == "alpha/a"


@pytest.mark.parametrize("split", [[(1, 0.0)], [(9, 1.0)]])
def test_an_alias_without_a_weighted_version_does_not_resolve(split: list[tuple[int, float]]) -> None:
    made = view(alias("sql", OLD, split=split))
    assert digest(made, "sql") is None
    assert digest(made, f"sql@{OLD}") is None
    assert made.visible(ANYONE) == []


def test_adapters_of_external_models_are_not_offered() -> None:
    made = view(alias("sql", OLD, model="theirs"))
    assert digest(made, "sql") is None
    assert digest(made, "theirs:sql") is None


def test_a_new_catalog_replaces_names_and_keeps_what_did_not_change() -> None:
    made = view(alias("sql", OLD), alias("chat", OTHER))
    before = made.resolve("chat", ANYONE, None)
    made.take(catalog(alias("sql", OLD, NEW), alias("chat", OTHER)))
    assert digest(made, "sql") == "alpha/b"
    assert made.resolve("chat", ANYONE, None) is before
    made.take(catalog(alias("chat", OTHER, tenants=["web"])))
    assert digest(made, "sql") is None
    assert digest(made, "chat", SHOP) is None


def test_the_view_knows_whether_adapters_are_wanted_and_known() -> None:
    made = CatalogView(lambda: 0)
    made.read(Deployment(models=(ModelSpec(name="alpha"),)))
    assert not made.wanted and not made.known
    made.read(Deployment(models=MODELS))
    assert made.wanted and not made.known
    made.take(catalog())
    assert made.known
