"""What a pod's metadata say of the server in it: its replica, shape, mode, adapters, and ports of KV events.

Labels of a service, which Kubernetes copies to its EndpointSlices, say the same of all of its pods.
"""

from __future__ import annotations

from collections.abc import Mapping

from store.kubernetes.api_server import ObjectMetadata

PREFIX = "tidegate.io/"
# Labels.
SHAPE, MODE = f"{PREFIX}shape", f"{PREFIX}mode"
# An annotation, with commas between the names.
ADAPTERS = f"{PREFIX}adapters"
# Labels or annotations.
KV_EVENTS_PORT, KV_EVENTS_REPLAY_PORT = f"{PREFIX}kv-events-port", f"{PREFIX}kv-events-replay-port"


def replica_id(pod: str, uid: str) -> str:
    """The id of a pod's replica, by its name and uid.

    The name, unless it ends with a number: a pod of a StatefulSet or LeaderWorkerSet that is replaced has
    its successor's name.
    """
    return f"{pod}-{uid[:8]}" if uid and pod.rpartition("-")[2].isdecimal() else pod


def shape_and_mode(pod: ObjectMetadata, service: Mapping[str, str]) -> tuple[str, str] | None:
    """The labels of the pod, or those of its ``service``; ``None`` if neither has one of the two."""
    for labels in (pod.labels, service):
        if labels.keys() & {SHAPE, MODE}:
            return labels.get(SHAPE, ""), labels.get(MODE, "")
    return None


def kv_events_ports(pod: ObjectMetadata, service: Mapping[str, str]) -> tuple[str, str] | None:
    """The ports of its KV events, as the pod, or else a label of its ``service``, says them."""
    for given in (pod.annotations, pod.labels, service):
        if KV_EVENTS_PORT in given:
            return given[KV_EVENTS_PORT], given.get(KV_EVENTS_REPLAY_PORT, "")
    return None


def adapters_of(pod: ObjectMetadata) -> tuple[str, ...]:
    """The names in the annotation."""
    names = (name.strip() for name in pod.annotations.get(ADAPTERS, "").split(","))
    return tuple(dict.fromkeys(name for name in names if name))
