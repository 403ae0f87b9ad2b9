"""Deployment documents of simulated models, small enough to start many of."""

from __future__ import annotations

from typing import Any

from policy.config.deployment import Deployment
from policy.deployment_file.parse import parse


def sim_model(name: str = "m", **over: Any) -> dict[str, Any]:
    """One model with the shapes ``large`` (2 cores) and ``small`` (1 core) and both modes."""
    model: dict[str, Any] = {
        "name": name,
        "engine": "sim",
        "sim": {"profile": "sim-small"},
        "shapes": {"large": {"cpus": 2}, "small": {"cpus": 1}},
        "modes": {
            "multi-replica": {"shape": "small", "replicas": {"min": 1, "max": 4}},
            "single-large": {"shape": "large", "replicas": 1},
        },
        "control": {"mode": {"drain_timeout_s": 10}, "start_timeout_s": 60},
    }
    return model | over


def external_model(api: str, name: str = "m", **over: Any) -> dict[str, Any]:
    """One external model whose pods are those of a StatefulSet and of a Deployment."""
    service = {"service": "vllm", "namespace": "models", "port": "http", "api": api}
    return {
        "name": name,
        "engine": "external",
        "discovery": {"kubernetes": service | over.pop("kubernetes", {})},
        "shapes": {
            "large": {"gpus": 2, "tensor_parallel": 2, "workload": "deployment/large"},
            "small": {"gpus": 1, "workload": "statefulset/small"},
        },
        "modes": {
            "multi-replica": {"shape": "small", "replicas": {"min": 0, "max": 4}},
            "single-large": {"shape": "large", "replicas": 1},
        },
    } | over


def document(*models: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """A whole document over ``models``."""
    return {"models": list(models) or [sim_model()], **sections}


def deployment(*models: dict[str, Any], **sections: Any) -> Deployment:
    """The same, parsed."""
    return parse(document(*models, **sections))
