"""The objects of Kubernetes: their names and labels, and how they are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

KubernetesObject = dict[str, Any]

INSTANCE = "app.kubernetes.io/instance"


@dataclass(frozen=True)
class ManifestOptions:
    """The ``name`` of all objects, their ``namespace``, the ``image``, the least number of ``gateways``.

    Of several ``controllers`` one leads.
    """

    name: str
    namespace: str
    image: str
    gateways: int = 2
    controllers: int = 1
    service_monitor: bool = False


def as_yaml(objects: list[KubernetesObject]) -> str:
    """The objects as one YAML stream."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False)


class _Dumper(yaml.SafeDumper):
    """Without anchors, and with texts of several lines as such."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def named(options: ManifestOptions, role: str) -> str:
    """The name of the objects of a role."""
    return f"{options.name}-{role}" if role else options.name


def labels_of(options: ManifestOptions, role: str = "") -> dict[str, str]:
    """The labels of the pods of a role."""
    return {"app.kubernetes.io/name": f"tidegate-{role}" if role else "tidegate", INSTANCE: options.name}


def object_of(
    api: str, kind: str, options: ManifestOptions, *, name: str = "", namespace: str = "",
    labels: dict[str, str] | None = None, **content: Any,
) -> KubernetesObject:  # fmt: skip
    metadata = {
        "name": name or options.name,
        "namespace": namespace or options.namespace,
        "labels": labels_of(options) | (labels or {}),
    }
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **content}
