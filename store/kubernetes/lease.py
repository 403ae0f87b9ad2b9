"""The controllers' lease as a Lease of Kubernetes (``coordination.k8s.io/v1``).

Its holder, duration, times and transitions are where other programs look for them; the holder's address and
the count of renewals are annotations. The API server refuses a write that does not follow the version read.
"""

from __future__ import annotations

import asyncio
import math
from datetime import UTC, datetime
from typing import Any

import httpx
import msgspec

from policy.config.control import KubernetesLease
from policy.errors import Unreachable
from policy.leader_election import LeaderLease
from store.kubernetes.api_server import ObjectMetadata, api_client, own_namespace

ADDRESS = "tidegate.io/address"
RENEWALS = "tidegate.io/renewals"
LEASE_S = "tidegate.io/lease-seconds"


class _Spec(msgspec.Struct, rename="camel", omit_defaults=True):
    """An empty holder has released the lease."""

    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class _Object(msgspec.Struct):
    metadata: ObjectMetadata
    spec: _Spec = msgspec.field(default_factory=_Spec)


class KubernetesLeaseStore:
    """A lease store in the Lease ``named``; every call blocks, and raises :class:`Unreachable`."""

    def __init__(self, named: KubernetesLease) -> None:
        self._named = named
        self._namespace = named.namespace or own_namespace()
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{self._namespace}/leases"
        # The lease that was read or written last, and its version.
        self._known: tuple[LeaderLease | None, str] = (None, "")

    def read(self) -> LeaderLease | None:
        """The lease; ``None`` before there was any."""
        answer = self._call("GET", f"/{self._named.name}")
        if answer.status_code == httpx.codes.NOT_FOUND:
            self._known = None, ""
        else:
            self._take(self._checked(answer))
        return self._known[0]

    def replace(self, seen: LeaderLease | None, new: LeaderLease) -> bool:
        """Write ``new`` if the lease is still the one that was ``seen``; whether it was."""
        known, version = self._known
        if known != seen:
            return False
        document = self._document(new, version)
        if version:
            answer = self._call("PUT", f"/{self._named.name}", document)
        else:
            answer = self._call("POST", "", document)
        if answer.status_code in (httpx.codes.CONFLICT, httpx.codes.NOT_FOUND):
            return False
        written = msgspec.json.decode(self._checked(answer).content, type=_Object)
        self._known = new, written.metadata.resource_version
        return True

    def _take(self, answer: httpx.Response) -> None:
        found = msgspec.json.decode(answer.content, type=_Object)
        spec, notes = found.spec, found.metadata.annotations
        lease = LeaderLease(
            holder=spec.holder_identity or notes.get(ADDRESS, ""),
            address=notes.get(ADDRESS, ""),
            term=spec.lease_transitions or 0,
            lease_s=float(notes.get(LEASE_S, spec.lease_duration_seconds or 0)),
            renewals=int(notes.get(RENEWALS, 0)),
            released=not spec.holder_identity,
            acquired_at=_seconds(spec.acquire_time),
            renewed_at=_seconds(spec.renew_time),
        )
        known, _ = self._known
        # Times lose digits on their way: the value that was written stays the one that is known.
        same = known is not None and _version(known) == _version(lease)
        self._known = known if same else lease, found.metadata.resource_version

    def _document(self, lease: LeaderLease, version: str) -> dict[str, Any]:
        metadata: dict[str, Any] = {
            "name": self._named.name,
            "namespace": self._namespace,
            "annotations": {
                ADDRESS: lease.address, RENEWALS: str(lease.renewals), LEASE_S: str(lease.lease_s),
            },
        }  # fmt: skip
        if version:
            metadata["resourceVersion"] = version
        spec = {
            "holderIdentity": "" if lease.released else lease.holder,
            "leaseDurationSeconds": math.ceil(lease.lease_s),
            "acquireTime": _time(lease.acquired_at),
            "renewTime": _time(lease.renewed_at),
            "leaseTransitions": lease.term,
        }
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}

    def _call(self, method: str, path: str, body: Any = None) -> httpx.Response:
        async def call() -> httpx.Response:
            # A new client each time: the pod's token is renewed.
            async with api_client(self._named.api) as client:
                return await client.request(method, self._path + path, json=body)

        try:
            return asyncio.run(call())
        except (httpx.HTTPError, OSError) as error:
            raise Unreachable(f"the API server of Kubernetes does not answer: {error!r}") from error

    def _checked(self, answer: httpx.Response) -> httpx.Response:
        if answer.is_success:
            return answer
        text = answer.text[:300]
        raise Unreachable(
            f"the Lease {self._named.name}: the API server answered {answer.status_code}: {text}"
        )


def _version(lease: LeaderLease) -> tuple[str, int, int]:
    """What another value differs in, also that of another process after the Lease was deleted."""
    return "" if lease.released else lease.holder, lease.term, lease.renewals


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _seconds(time: str | None) -> float:
    return datetime.fromisoformat(time).timestamp() if time else 0.0
