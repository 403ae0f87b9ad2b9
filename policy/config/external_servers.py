"""Servers of external models: listed in the deployment file, or discovered."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from policy.config.control import Section


class ServerSettings(Section, frozen=True, kw_only=True):
    """What holds for a server beside its URL.

    ``model`` is its name for the model, if it differs from ours. The API key is in ``key_file``, or in the
    environment variable ``key_env`` of the gateway. ``ca_file`` contains the certificates that its own is
    verified with, instead of the system's. ``max_in_flight`` bounds its requests; it is learned if ``None``.
    """

    model: str = ""
    key_file: str | None = None
    key_env: str | None = None
    ca_file: str | None = None
    max_in_flight: Annotated[int, Meta(ge=1, le=65_536)] | None = None


class ExternalServer(ServerSettings, frozen=True, kw_only=True):
    """A server of an external model."""

    url: str

    @property
    def base(self) -> str:
        """The URL without the part that all paths of the API begin with."""
        return self.url.rstrip("/").removesuffix("/v1")


class KubernetesService(Section, frozen=True, kw_only=True):
    """The endpoints of a Kubernetes service that are ready.

    ``namespace`` is the gateway's own by default, ``port`` the name or number of an endpoint's port, by
    default the first. ``api`` is the URL of the API server without credentials, such as `kubectl proxy`; by
    default it is the cluster's, with the pod's service account. The counts of a model with modes are set by
    Tidegate, or, with ``scaled_by: autoscaler``, by KEDA or an HPA that reads them.
    """

    service: str
    namespace: str = ""
    port: str | int | None = None
    api: str = ""
    scaled_by: Literal["tidegate", "autoscaler"] = "tidegate"


class Discovery(ServerSettings, frozen=True, kw_only=True):
    """Where the servers of an external model are found while it runs; the settings hold for all of them.

    ``dns`` is ``HOST:PORT`` with one server for each address, ``file`` a YAML list as ``urls``, read again
    when it changes. ``https``: their URLs are ``https``.
    """

    dns: str = ""
    file: str | None = None
    kubernetes: KubernetesService | None = None
    https: bool = False

    @property
    def is_autoscaled(self) -> bool:
        """Whether another autoscaler carries out the counts of its modes."""
        return self.kubernetes is not None and self.kubernetes.scaled_by == "autoscaler"
