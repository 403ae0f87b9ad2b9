"""Statuses of models as the controller reports them."""

from __future__ import annotations

from typing import Any

from serve.controller_api_schema import ModelStatus


def model_status(**over: Any) -> ModelStatus:
    """A model with one ready replica, but for ``over``."""
    fields: dict[str, Any] = {
        "name": "sim", "engine": "sim", "mode": "multi-replica", "shape": "small", "generation": 1,
        "target": 1, "ready": 1, "phase": "steady",
    }  # fmt: skip
    return ModelStatus(**fields | over)
