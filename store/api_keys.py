"""API keys of tenants, their digests, and the secrets of cache salts."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from pathlib import Path

from store.state_dir import StateDir, write_atomic

PREFIX = "tg-"
_BYTES = 32


def new_key() -> str:
    """A new key of 256 random bits; it is not stored."""
    return PREFIX + secrets.token_urlsafe(_BYTES)


def digest_of(key: bytes) -> str:
    """SHA-256 in hex, as in ``keys_sha256``; 256 random bits need no salt and no slow hash."""
    return hashlib.sha256(key).hexdigest()


def own_key(secret: str) -> str:
    """Tidegate's own key for the client port, to which the internal ``secret`` itself is never sent."""
    return PREFIX + hmac.new(secret.encode(), b"client port", hashlib.sha256).hexdigest()


def salt_secret(state: StateDir) -> bytes:
    """The secret of this deployment's cache salts, made on first use with mode 600.

    It is independent of the internal secret, so a leaked salt opens no port. Raises ``PermissionError`` if
    other users can read it.
    """
    path = state.ensure().root / "salt-secret"
    if not path.exists():
        _make(path)
    secret = path.read_bytes()
    if len(secret) < _BYTES or path.stat().st_mode & 0o077:
        raise PermissionError(
            f"{path}: expected at least {_BYTES} bytes that only its owner may read (mode 600);"
            " remove it to have a new one made"
        )
    return secret


def salt_of(secret: bytes, tenant: str) -> str:
    """The cache salt of a tenant: 32 hex digits of HMAC-SHA256, which reveal neither name nor secret."""
    return hmac.new(secret, tenant.encode(), hashlib.sha256).hexdigest()[:32]


def _make(path: Path) -> None:
    """Write a new secret, unless another process does so first."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    write_atomic(part, secrets.token_hex(_BYTES).encode(), mode=0o600)
    try:
        path.hardlink_to(part)
    except FileExistsError:
        pass
    finally:
        part.unlink()
