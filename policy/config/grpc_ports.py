"""The sections ``endpoint_picker`` and ``external_scaler``: gRPC ports for other machinery."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from policy.config.control import Section


class GrpcPort(Section, frozen=True, kw_only=True):
    """A gRPC port of the gateway workers, which share it.

    With ``cert_file`` and ``key_file`` it speaks TLS. With ``client_ca_file`` it accepts only clients that
    have a certificate of that authority.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65_535)] = 9002
    cert_file: str | None = None
    key_file: str | None = None
    client_ca_file: str | None = None


class EndpointPicker(GrpcPort, frozen=True, kw_only=True):
    """The port by which other proxies have their requests admitted and routed.

    Who reaches it learns what replicas are sent, their keys included.
    """


class ExternalScaler(GrpcPort, frozen=True, kw_only=True):
    """The port by which KEDA reads the desired counts of models that it scales."""

    port: Annotated[int, Meta(ge=1, le=65_535)] = 9003
