"""API keys of tenants and their digests, keys for other servers, and the secrets of cache salts."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from pathlib import Path

PREFIX = "tg-"
# Of keys for the admin port.
ADMIN_PREFIX = "tga-"
_BYTES = 32
_WORD = re.compile(rb"[!-~]+")


def new_key(prefix: str = PREFIX) -> str:
    """A new key of 256 random bits; it is not stored."""
    return prefix + secrets.token_urlsafe(_BYTES)


def digest_of(key: bytes) -> str:
    """SHA-256 in hex, as in ``keys_sha256``; 256 random bits need no salt and no slow hash."""
    return hashlib.sha256(key).hexdigest()


def own_key(secret: str) -> str:
    """Tidegate's own key for the client port, to which the internal ``secret`` itself is never sent."""
    return PREFIX + hmac.new(secret.encode(), b"client port", hashlib.sha256).hexdigest()


def read_key(file: str | None, variable: str | None) -> tuple[bytes, str]:
    """The key in ``file`` or in the environment ``variable``, if one is named; else why it cannot be used."""
    if file is not None:
        try:
            key = Path(file).read_bytes().strip()
        except OSError as error:
            return b"", f"the key file cannot be read: {error.strerror}"
    elif variable is not None:
        key = os.environb.get(variable.encode(), b"")
        if not key:
            return b"", f"the environment variable {variable} is not set"
    else:
        return b"", ""
    # Other characters could end the header or the request.
    return (key, "") if _WORD.fullmatch(key) else (b"", "the key is not one word of ASCII")


def salt_secret(secret: str) -> bytes:
    """The secret of the cache salts on all hosts of a deployment; it does not reveal the ``secret``."""
    return hmac.new(secret.encode(), b"cache salts", hashlib.sha256).digest()


def salt_of(secret: bytes, tenant: str) -> str:
    """The cache salt of a tenant: 32 hex digits of HMAC-SHA256, which reveal neither name nor secret."""
    return hmac.new(secret, tenant.encode(), hashlib.sha256).hexdigest()[:32]
