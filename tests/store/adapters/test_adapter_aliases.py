"""Aliases and their splits, as a timeline of changes, on SQLite and PostgreSQL."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import update

from policy.errors import AdapterRefused, AdapterUnknown, TargetError
from policy.wire.adapter_catalog import Alias
from store.adapters.adapter_aliases import DOCUMENT, KEPT_VERSIONS, AdapterAliases, NewVersion
from store.adapters.database_tables import aliases
from store.adapters.validate import AdapterFacts
from store.database import Database
from tests.clock import Clock

FACTS = AdapterFacts(rank=8, size=1000)
A, B, C, D = (letter * 64 for letter in "abcd")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry(database_url: str, clock: Clock) -> Iterator[AdapterAliases]:
    opened = AdapterAliases(database_url, clock)
    yield opened
    opened.close()


def add(registry: AdapterAliases, digest: str, name: str = "sql", **options: object) -> Alias:
    return registry.put("m", name, [NewVersion(digest, FACTS, f"/from/{digest[0]}")], **options)  # type: ignore[arg-type]


def only(registry: AdapterAliases) -> Alias:
    (alias,) = registry.catalog(1.0, 2).aliases
    return alias


def digests(alias: Alias) -> dict[str, float]:
    found = {version.number: version.digest[0] for version in alias.versions}
    return {found[number]: weight for number, weight in alias.split}


def test_a_new_alias_has_one_version(registry: AdapterAliases) -> None:
    alias = add(registry, A)
    assert (alias.model, alias.name, alias.at) == ("m", "sql", 1000)
    assert (alias.revision, alias.split) == (1, ((1, 1.0),))
    (version,) = alias.versions
    assert (version.number, version.digest, version.rank, version.size) == (1, A, 8, 1000)
    assert (version.source, version.at) == ("/from/a", 1000)
    catalog = registry.catalog(5.0, 7)
    assert (catalog.epoch, catalog.version, catalog.aliases) == (5.0, 7, (alias,))


def test_a_replaced_alias_keeps_its_earlier_version(registry: AdapterAliases, clock: Clock) -> None:
    add(registry, A)
    clock.now = 1010.0
    alias = add(registry, B)
    assert digests(alias) == {"b": 1.0}
    versions = [(version.number, version.digest, version.at) for version in alias.versions]
    assert versions == [(1, A, 1000), (2, B, 1010)]
    assert (alias.revision, alias.at) == (2, 1010)
    assert only(registry) == alias


def test_adding_the_same_content_again_changes_nothing(registry: AdapterAliases, clock: Clock) -> None:
    first = add(registry, A, tenants=["acme"])
    clock.now = 2000.0
    assert add(registry, A) == first
    assert registry.revision() == 1


def test_adding_the_content_of_an_older_version_keeps_its_number(registry: AdapterAliases) -> None:
    add(registry, A)
    add(registry, B)
    alias = add(registry, A)
    assert (alias.split, len(alias.versions), alias.revision) == (((1, 1.0),), 2, 3)


def test_a_split_serves_several_versions_of_an_alias(registry: AdapterAliases) -> None:
    add(registry, A)
    add(registry, B)
    alias = registry.split("m", "sql", {1: 95, 2: 5})
    assert alias.split == ((1, 95.0), (2, 5.0))
    assert registry.split("m", "sql", {2: 5, 1: 95}) == alias, "the same is no change"
    assert registry.split("m", "sql", {1: 0, 2: 5}).split == ((2, 5.0),)
    assert digests(add(registry, A)) == {"a": 1.0}, "an add is all of it"


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({3: 1.0}, "has no version v3; it has v1, v2"),
        ({}, "one above it"),
        ({1: 0.0}, "one above it"),
        ({1: -1.0, 2: 2.0}, "numbers from 0"),
        ({1: float("nan")}, "numbers from 0"),
        ({1: float("inf")}, "numbers from 0"),
    ],
)
def test_invalid_splits_are_refused(
    registry: AdapterAliases, weights: dict[int, float], message: str
) -> None:
    add(registry, A)
    before = add(registry, B)
    with pytest.raises(TargetError, match=message):
        registry.split("m", "sql", weights)
    assert only(registry) == before


BACK = None


def change(registry: AdapterAliases, step: str | tuple[str, float] | dict[int, float] | int | None) -> Alias:
    """Add a version (with a percentage), split, or roll back (to a version)."""
    if isinstance(step, dict):
        return registry.split("m", "sql", step)
    if step is BACK or isinstance(step, int):
        return registry.rollback("m", "sql", step)
    letter, percent = (step, None) if isinstance(step, str) else step
    return add(registry, letter * 64, percent=percent)


@pytest.mark.parametrize(
    ("steps", "served"),
    [
        # The weights before the last change.
        (["a", "b", BACK], {"a": 1}),
        (["a", "b", "c", BACK], {"b": 1}),
        (["a", "b", "c", BACK, BACK], {"a": 1}),
        (["a", ("b", 5), BACK], {"a": 1}),
        (["a", ("b", 0), {1: 95, 2: 5}, {1: 50, 2: 50}, BACK], {"a": 95, "b": 5}),
        (["a", ("b", 0), {1: 95, 2: 5}, {1: 50, 2: 50}, {2: 1}, BACK, BACK, BACK], {"a": 1}),
        (["a", "b", {1: 1, 2: 3}, "c", BACK], {"a": 1, "b": 3}),
        # Never more of the newest version.
        (["a", "b", {1: 95, 2: 5}, BACK], {"a": 1}),
        (["a", ("b", 50), {1: 95, 2: 5}, BACK], {"a": 1}),
        (["a", "b", {1: 1, 2: 3}, "c", BACK, BACK], {"a": 1}),
        (["a", "b", "c", {2: 1}, BACK], {"a": 1}),
        # What was rolled back is no target.
        (["a", "b", BACK, "c", BACK], {"a": 1}),
        (["a", "b", "c", 1, "d", BACK], {"a": 1}),
        # To a version.
        (["a", "b", "c", 1], {"a": 1}),
        (["a", "b", {1: 95, 2: 5}, 2], {"b": 1}),
        (["a", "b", "c", "d", 3, BACK], {"b": 1}),
        (["a", ("b", 0), 2, BACK], {"a": 1}),
        # A part of the requests for a new version.
        (["a", ("b", 0)], {"a": 1}),
        (["a", ("b", 5)], {"a": 95, "b": 5}),
        (["a", ("b", 100)], {"b": 1}),
        (["a", ("b", 50), ("c", 20)], {"a": 40, "b": 40, "c": 20}),
        (["a", ("b", 50), ("b", 10)], {"a": 90, "b": 10}),
        (["a", ("b", 50), ("b", 0)], {"a": 1}),
        ([("a", 100)], {"a": 1}),
    ],
    ids=str,
)
def test_what_is_served_after_changes(
    registry: AdapterAliases, steps: list[Any], served: dict[str, float]
) -> None:
    for step in steps:
        alias = change(registry, step)
    assert digests(alias) == served
    assert only(registry) == alias


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (["a", BACK], "sql has no former split to return to; it has v1"),
        (["a", "b", BACK, BACK], "no former split"),
        (["a", "b", 1, BACK], "no former split"),
        (["a", "b", {1: 1}, BACK], "no former split"),
        (["a", "b", "a", BACK], "no former split"),
        (["a", "b", 3], "has no version v3; it has v1, v2"),
        ([("a", 0)], "got 0, expected 100: sql has no other version"),
        (["a", ("a", 5)], "got 5, expected 100: sql has no other version"),
        (["a", ("b", 101)], "expected 0 to 100"),
        (["a", ("b", float("nan"))], "expected 0 to 100"),
    ],
    ids=str,
)
def test_a_change_that_is_refused_changes_nothing(
    registry: AdapterAliases, steps: list[Any], message: str
) -> None:
    for step in steps[:-1]:
        change(registry, step)
    before = registry.catalog(0, 0)
    with pytest.raises(TargetError, match=message):
        change(registry, steps[-1])
    assert registry.catalog(0, 0) == before


def test_a_removed_alias_is_unknown(registry: AdapterAliases) -> None:
    add(registry, A)
    add(registry, B, name="law")
    registry.remove("m", "sql")
    assert only(registry).name == "law"
    assert registry.revision() == 3
    alias = add(registry, C)
    assert (alias.revision, [version.number for version in alias.versions]) == (4, [1])
    with pytest.raises(TargetError):
        registry.rollback("m", "sql")


def test_unknown_names_are_refused(registry: AdapterAliases) -> None:
    add(registry, A)
    for run in (
        lambda: registry.remove("m", "law"),
        lambda: registry.rollback("n", "sql"),
        lambda: registry.split("m", "law", {1: 1.0}),
    ):
        with pytest.raises(AdapterUnknown, match="there is no adapter"):
            run()


def test_aliases_of_different_models_are_independent(registry: AdapterAliases) -> None:
    add(registry, A)
    registry.put("other/m", "sql", candidates(b=1))
    registry.remove("m", "sql")
    assert (only(registry).model, digests(only(registry))) == ("other/m", {"b": 1.0})


@pytest.mark.parametrize("name", ["", "a b", "a@b", "../x", "-a", "a" * 65, "a\n", "a:b", "ä"])
def test_invalid_names_are_refused(registry: AdapterAliases, name: str) -> None:
    with pytest.raises(AdapterRefused, match="is not a valid adapter name") as caught:
        add(registry, A, name=name)
    assert caught.value.code == "name"


@pytest.mark.parametrize("digest", ["/" * 64, "a" * 63, "A" * 64])
def test_only_digests_are_recorded(registry: AdapterAliases, digest: str) -> None:
    with pytest.raises(ValueError, match="sha256"):
        add(registry, digest)


def test_the_tenants_of_an_alias_are_kept_until_others_are_given(registry: AdapterAliases) -> None:
    assert add(registry, A, tenants=["b", "a", "b"]).tenants == ("a", "b")
    assert add(registry, B).tenants == ("a", "b")
    alias = add(registry, B, tenants=[])
    assert (alias.tenants, alias.revision) == ((), 3)
    assert only(registry) == alias


def candidates(**weights: float) -> list[NewVersion]:
    return [NewVersion(letter * 64, FACTS, f"/{letter}", weight) for letter, weight in weights.items()]


def test_a_declaration_of_the_deployment_file_is_applied(registry: AdapterAliases) -> None:
    alias = registry.put("m", "sql", candidates(a=95, b=5, c=0), origin=DOCUMENT)
    assert alias.split == ((1, 95.0), (2, 5.0))
    assert [version.number for version in alias.versions] == [1, 2, 3]
    assert registry.declared() == {("m", "sql"): {"/a": A, "/b": B, "/c": C}}
    add(registry, A, name="law")
    assert registry.declared().keys() == {("m", "sql")}


def test_a_restart_does_not_undo_later_changes(registry: AdapterAliases) -> None:
    registry.put("m", "sql", candidates(a=1), origin=DOCUMENT)
    registry.put("m", "sql", candidates(b=1), origin=DOCUMENT)
    back = registry.rollback("m", "sql")
    assert registry.put("m", "sql", candidates(b=1), origin=DOCUMENT) == back
    added = add(registry, C)
    assert registry.put("m", "sql", candidates(b=1), origin=DOCUMENT) == added
    assert registry.declared() == {("m", "sql"): {"/a": A, "/b": B}}
    assert digests(registry.put("m", "sql", candidates(d=1), origin=DOCUMENT)) == {"d": 1.0}


def test_declarations_of_earlier_versions_name_their_sources(
    registry: AdapterAliases, database_url: str
) -> None:
    """They recorded digests alone; of two versions from one source the declared one counts."""
    registry.put("m", "sql", candidates(a=1), origin=DOCUMENT)
    registry.put("m", "sql", [NewVersion(B, FACTS, "/a")])
    with contextlib.closing(Database(database_url)) as database, database.writing() as connection:
        former = msgspec.json.encode({"content": [(A, 1.0)], "tenants": None}).decode()
        connection.execute(update(aliases).values(declared=former))
    assert registry.declared() == {("m", "sql"): {"/a": A}}


def test_a_declaration_changes_tenants_of_the_same_content(registry: AdapterAliases) -> None:
    add(registry, A)
    registry.put("m", "sql", candidates(a=1), origin=DOCUMENT)
    assert registry.declared() == {("m", "sql"): {"/a": A}}, "it was added by command before"
    add(registry, B)
    alias = registry.put("m", "sql", candidates(a=1), tenants=["acme"], origin=DOCUMENT)
    assert (digests(alias), alias.tenants) == ({"b": 1.0}, ("acme",))


def test_tenants_given_over_the_api_survive_a_restart(registry: AdapterAliases) -> None:
    for declared in ([], ["law"]):
        registry.put("m", "sql", candidates(a=1), tenants=declared, origin=DOCUMENT)
        added = registry.put("m", "sql", candidates(a=1), tenants=["acme"])
        assert registry.put("m", "sql", candidates(a=1), tenants=declared, origin=DOCUMENT) == added
        assert added.tenants == ("acme",)
    alias = registry.put("m", "sql", candidates(b=1), tenants=["law"], origin=DOCUMENT)
    assert (digests(alias), alias.tenants) == ({"b": 1.0}, ("acme",)), "the tenants are unchanged"


def test_the_same_content_twice_is_one_version(registry: AdapterAliases) -> None:
    twice = [*candidates(a=1), *candidates(a=2)]
    assert registry.put("m", "sql", twice).split == ((1, 3.0),)
    with pytest.raises(TargetError):
        registry.put("m", "law", candidates(a=0))
    with pytest.raises(ValueError, match="at least one"):
        registry.put("m", "law", [])


def test_digests_of_no_alias_are_unused_after_a_time(registry: AdapterAliases, clock: Clock) -> None:
    add(registry, A)
    add(registry, B)
    add(registry, A, name="law")
    stored = {A, B, C}
    assert registry.unused_digests(stored, 60) == {C}
    clock.now = 2000.0
    registry.remove("m", "sql")
    assert registry.unused_digests(stored, 60) == {C}, "a request for it may be on its way"
    clock.now = 2061.0
    assert registry.unused_digests(stored, 60) == {B, C}, "law still has the other"
    add(registry, B)
    assert registry.unused_digests(stored, 60) == {C}
    clock.now = 3000.0
    assert registry.unused_digests(stored, 60) == {C}


@pytest.mark.slow
def test_an_alias_keeps_recent_and_all_served_versions(registry: AdapterAliases, clock: Clock) -> None:
    many = [f"{i:064x}" for i in range(KEPT_VERSIONS + 3)]
    add(registry, many[0])
    add(registry, many[1])
    for digest in many[2:]:
        registry.split("m", "sql", {1: 1.0})
        alias = add(registry, digest)
    alias = registry.rollback("m", "sql")
    assert alias.split == ((1, 1.0),), "there is always a way back"
    numbers = [version.number for version in alias.versions]
    assert len(numbers) == KEPT_VERSIONS
    assert numbers == [1, *range(5, KEPT_VERSIONS + 4)]
    clock.now += 100
    assert registry.unused_digests(many, 60) == set(many[1:4])
    for _ in range(50):
        try:
            alias = registry.rollback("m", "sql")
        except TargetError:
            break
        assert all(alias.version(number) for number, _ in alias.split)


def test_the_declared_version_is_kept_beside_recent_ones(registry: AdapterAliases) -> None:
    """Without it a restart takes the newest version of its source for the declared one."""
    registry.put("m", "sql", candidates(a=1), origin=DOCUMENT)
    for i in range(KEPT_VERSIONS + 1):
        alias = add(registry, f"{i:064x}")
    assert alias.versions[0].digest == A
    assert len(alias.versions) == KEPT_VERSIONS
    assert registry.declared() == {("m", "sql"): {"/a": A}}


CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from([A, B, C, D])),
        st.tuples(st.just("split"), st.dictionaries(st.integers(1, 4), st.integers(0, 9), min_size=1)),
        st.tuples(st.just("rollback"), st.none()),
        st.tuples(st.just("remove"), st.none()),
    ),
    max_size=25,
)


@pytest.mark.slow
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CHANGES)
def test_an_alias_has_the_versions_it_serves(
    registry: AdapterAliases, changes: list[tuple[str, object]]
) -> None:
    for alias in registry.catalog(0, 0).aliases:
        registry.remove(alias.model, alias.name)
    past: list[dict[str, float]] = []
    for what, how in changes:
        before = registry.revision()
        try:
            match what:
                case "add":
                    alias = add(registry, str(how))
                case "split":
                    alias = registry.split("m", "sql", how)  # type: ignore[arg-type]
                case "rollback":
                    (former, *_) = (*registry.catalog(0, 0).aliases, None)
                    alias = registry.rollback("m", "sql")
                    assert former is not None
                    newest = max(former.shares)
                    assert max(alias.shares) <= newest
                    assert alias.shares.get(newest, 0.0) < former.shares[newest]
                    assert digests(alias) in past
                case "remove":
                    registry.remove("m", "sql")
                    past = []
        except (AdapterUnknown, TargetError):
            assert registry.revision() == before
            continue
        if what == "remove":
            assert registry.catalog(0, 0).aliases == ()
            continue
        assert alias == only(registry)
        assert alias.split
        assert all(alias.version(number) is not None and weight > 0 for number, weight in alias.split)
        assert (registry.revision() > before) == (alias.revision > before)
        if not past or past[-1] != digests(alias):
            past.append(digests(alias))
