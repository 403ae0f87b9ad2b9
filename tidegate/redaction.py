"""Removes secrets from values that are shown: secret variables, key digests, and passwords in URLs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from store.adapters.fetch_context import redacted

_SECRETS = ("token", "key", "secret", "password")
_MASK = "***"
# Enough to distinguish two keys.
_DIGEST_SHOWN = 8
# A password in front of the host may have / and ?, and one may be among the options.
_USER = re.compile(r"(?<=://)[^:/]*(:[^@]*)?@")
_OPTION = re.compile(r"([?&][a-z]*password=)[^&]*")


def redact(value: Any, path: str = "") -> Any:
    """``value`` without secrets; ``path`` is its dotted path in the deployment file."""
    if isinstance(value, Mapping):
        return {key: redact(inner, f"{path}.{key}") for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redact(inner, path) for inner in value]
    last = path.rpartition(".")[2].lower()
    if last == "keys_sha256" and isinstance(value, str):
        return f"{value[:_DIGEST_SHOWN]}..."
    if isinstance(value, str) and ".adapters." in path:
        return redacted(value)
    if isinstance(value, str) and path.removeprefix(".") == "store":
        return _OPTION.sub(rf"\1{_MASK}", _USER.sub(f"{_MASK}@", value, count=1))
    secret = ".env." in path and any(word in last for word in _SECRETS)
    return _MASK if secret and value is not None else value
