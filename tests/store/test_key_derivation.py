"""Keys are random and stored as digests; salts differ by tenant and deployment."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from policy.errors import PreconditionFailed
from store.key_derivation import PREFIX, digest_of, new_key, own_key, salt_of, salt_secret
from store.state_dir import StateDir


def test_a_key_is_long_random_and_valid_in_a_header() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith(PREFIX) and len(key) >= 46 and key.isascii() for key in keys)
    assert all(key.isprintable() and " " not in key for key in keys)
    assert digest_of(b"tg-1") == hashlib.sha256(b"tg-1").hexdigest()


def test_the_own_key_is_derived_from_the_secret_and_does_not_reveal_it() -> None:
    assert own_key("secret-1") == own_key("secret-1") != own_key("secret-2")
    assert own_key("secret-1").startswith(PREFIX)
    assert "secret-1" not in own_key("secret-1")


def test_the_secret_is_created_once_and_private(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    with ThreadPoolExecutor(8) as threads:
        found = set(threads.map(lambda _: state.secret(), range(8)))
    assert found == {state.secret()}
    assert state.secret_path.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in state.root.iterdir() if path.is_file()] == ["secret"]


def test_another_host_has_the_secret_and_the_cache_salts_of_the_first(tmp_path: Path) -> None:
    first, second = StateDir(tmp_path / "first"), StateDir(tmp_path / "second")
    first.secret()
    second.adopt_secret(first.secret_path)
    assert second.secret() == first.secret()
    assert salt_secret(second.secret()) == salt_secret(first.secret())
    assert first.secret().encode() not in salt_secret(first.secret())
    for text in (None, "short"):
        path = tmp_path / "given"
        if text is not None:
            path.write_text(text)
        with pytest.raises(PreconditionFailed, match="given: "):
            second.adopt_secret(path)
    assert second.secret() == first.secret()


def test_salts_differ_by_tenant_and_by_deployment() -> None:
    salts = {salt_of(secret, tenant) for secret in (b"1" * 32, b"2" * 32) for tenant in ("a", "b", "")}
    assert len(salts) == 6
    assert salt_of(b"1" * 32, "a") == salt_of(b"1" * 32, "a")
    assert all(len(salt) == 32 and int(salt, 16) >= 0 for salt in salts)
