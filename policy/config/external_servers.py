"""Servers of external models: listed in the deployment file, or discovered."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta

from policy.config.control import Section
from policy.errors import ConfigError

Port = Annotated[int, Meta(ge=1, le=65_535)]


class ServerSettings(Section, frozen=True, kw_only=True):
    """What holds for a server beside its URL.

    ``model`` is its name for the model, if it differs from ours. The API key is in ``key_file``, or in the
    environment variable ``key_env`` of the gateway. ``ca_file`` contains the certificates that its own is
    verified with, instead of the system's. ``max_in_flight`` bounds its requests; it is learned if ``None``.
    ``shape`` and ``mode`` are those of the deployment file that it was built as, ``adapters`` what it serves
    beside the adapters that it lists. It publishes the events of its KV cache at ``kv_events_port`` of its
    host, and repeats them at ``kv_events_replay_port`` (vLLM's ``--kv-events-config``).
    """

    model: str = ""
    key_file: str | None = None
    key_env: str | None = None
    ca_file: str | None = None
    max_in_flight: Annotated[int, Meta(ge=1, le=65_536)] | None = None
    shape: str = ""
    mode: str = ""
    adapters: tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...] = ()
    kv_events_port: Port | None = None
    kv_events_replay_port: Port | None = None


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


class DiscoveryConfig(ServerSettings, frozen=True, kw_only=True):
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


class ServerShape(NamedTuple):
    """The declared shape and mode of a server, each empty if it is not known, and what is wrong."""

    shape: str
    mode: str
    problem: ConfigError | None = None


def server_shape(
    given: ServerSettings, shapes: Collection[str], modes: Mapping[str, str], at: str, known: str = ""
) -> ServerShape:
    """What a server is of which ``given`` says shape and mode; ``modes`` are shapes by mode.

    Each follows from the other where it can. A single shape is that of all servers, and ``known`` is certain.
    What is wrong is not used; ``at`` and the key say where it is written.
    """
    problem: ConfigError | None = None
    shape, mode = given.shape, given.mode
    if mode and mode not in modes:
        problem, mode = ConfigError(f"{at}mode", mode, _one_of("modes", modes)), ""
    if shape and shape not in shapes:
        problem, shape = ConfigError(f"{at}shape", shape, _one_of("shapes", shapes)), ""
    if mode and shape and modes[mode] != shape:
        problem, mode = ConfigError(f"{at}mode", mode, f"a mode of the shape {shape}"), ""
    shape = shape or modes.get(mode, "")
    if known:
        if shape and shape != known:
            key, value = ("shape", given.shape) if given.shape else ("mode", given.mode)
            problem = ConfigError(f"{at}{key}", value, f"{known}, the shape of its workload, or a mode of it")
        shape = known
    elif not shape and len(shapes) == 1:
        (shape,) = shapes
    of_shape = [name for name, its in modes.items() if its == shape]
    if mode not in of_shape:
        mode = of_shape[0] if len(of_shape) == 1 else ""
    return ServerShape(shape, mode, problem)


def _one_of(what: str, names: Collection[str]) -> str:
    return f"one of the {what}: {', '.join(names)}" if names else f"nothing: the model declares no {what}"
