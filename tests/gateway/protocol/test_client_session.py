"""The session of a request: which header or field names it, and which requests are of one session."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.protocol import body as bodies
from gateway.protocol.client_session import SESSION_HEADERS, given_session, session_key
from policy.hashing import hash_name

ACME, OTHER = hash_name("tenant acme"), hash_name("tenant other")
UUID = "54c1eb09-bc4c-4d2f-98eb-6d2ab2d5e2fe"
OLD_USER = f"user_{'a1' * 32}_account__session_{UUID}"
NEW_USER = json.dumps({"device_id": "a1" * 32, "account_uuid": "", "session_id": UUID})
MAIN, SUBAGENT = 1111, 2222  # hashes of two conversations' begins


def session(
    headers: dict[str, str] | None = None, opening: int = 0, tenant: int = ACME, **fields: Any
) -> int:
    received = {name.encode(): value.encode() for name, value in (headers or {}).items()}
    body = bodies.read(json.dumps({"model": "m", **fields}).encode())
    return session_key(tenant, given_session(received, body), opening)


@pytest.mark.parametrize("name", [name.decode() for name in SESSION_HEADERS])
def test_each_header_names_a_session(name: str) -> None:
    assert session({name: UUID}) == session({name: UUID}) != 0
    assert session({name: UUID}) != session({name: "another"})
    assert session({name: UUID}) != session({name: UUID}, tenant=OTHER)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        # Claude Code of any version, with and without its header.
        ({"headers": {"x-claude-code-session-id": UUID}}, {"metadata": {"user_id": OLD_USER}}),
        ({"metadata": {"user_id": NEW_USER}}, {"metadata": {"user_id": OLD_USER}}),
        ({"metadata": {"session_id": UUID}}, {"metadata": {"user_id": "someone", "session_id": UUID}}),
        # Codex of any version.
        ({"headers": {"session_id": UUID}}, {"headers": {"session-id": UUID}, "prompt_cache_key": UUID}),
        ({"headers": {"conversation_id": UUID}}, {"prompt_cache_key": UUID}),
        # The most specific id counts.
        (
            {"headers": {"x-session-id": "a", "x-claude-code-session-id": UUID}},
            {"headers": {"x-session-id": "a"}},
        ),
        ({"headers": {"session-id": UUID, "thread-id": "t"}}, {"headers": {"thread-id": "t"}}),
        # A value that is no id is passed over.
        (
            {"headers": {"x-session-id": "a b", "x-session-affinity": UUID}},
            {"headers": {"x-session-id": UUID}},
        ),
    ],
)
def test_one_session(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert session(**one) == session(**other) != 0


@pytest.mark.parametrize(
    "given",
    [
        {"headers": {"x-claude-code-session-id": UUID}},
        {"headers": {"session_id": UUID}},
        {"metadata": {"user_id": NEW_USER}},
        {"prompt_cache_key": "support-bot"},
        {},
    ],
)
def test_a_subagent_is_a_session_of_its_own(given: dict[str, Any]) -> None:
    assert session(opening=MAIN, **given) == session(opening=MAIN, **given) != 0
    assert session(opening=MAIN, **given) != session(opening=SUBAGENT, **given)


def test_an_id_of_a_conversation_stands_for_all_that_is_sent_under_it() -> None:
    headers = {"x-session-id": UUID}
    assert session(headers, opening=MAIN) == session(headers, opening=SUBAGENT) == session(headers)


def test_the_same_task_in_two_runs_is_two_sessions() -> None:
    assert session({"session_id": "a"}, opening=MAIN) != session({"session_id": "b"}, opening=MAIN)


@pytest.mark.parametrize(
    "value", ["", " ", "a b", "x" * 257, "é", "a\tb", "\x7f", "a\x00b", "\n"]
)  # fmt: skip
def test_an_odd_value_is_no_session(value: str) -> None:
    for name in SESSION_HEADERS:
        assert session({name.decode(): value}) == 0
    assert session(prompt_cache_key=value) == 0
    assert session(metadata={"session_id": value}) == 0
    assert session(metadata={"user_id": json.dumps({"session_id": value})}) == 0
    assert session(metadata={"user_id": f"user_a_account__session_{value}"}) == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": None},
        {"metadata": []},
        {"metadata": "user"},
        {"metadata": 5},
        {"metadata": {"user_id": 5, "session_id": {"a": 1}}},
        {"metadata": {"user_id": "{"}},
        {"metadata": {"user_id": '{"session_id": 5}'}},
        {"metadata": {"user_id": "[" * 500}},
        {"metadata": {"user_id": "{" * 5000}},
        {"metadata": {"session_id": "x" * 5000}},
        {"prompt_cache_key": None},
        {"prompt_cache_key": 5},
        {"prompt_cache_key": ["a"]},
        {"prompt_cache_key": "x" * 60_000},
        {"user": UUID, "safety_identifier": UUID},
    ],
)
def test_any_other_field_is_no_session(fields: dict[str, Any]) -> None:
    assert session(**fields) == 0


def test_a_key_that_all_users_of_an_application_share_names_no_user() -> None:
    body = bodies.read(b'{"model": "m", "prompt_cache_key": "bot"}')
    given = given_session({}, body)
    assert given is not None and not given.of_one_user
    named = given_session({b"x-session-id": b"a"}, body)
    assert named is not None and named.of_one_user
