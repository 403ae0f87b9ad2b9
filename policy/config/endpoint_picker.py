"""The section ``endpoint_picker``."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from policy.config.control import Section


class EndpointPicker(Section, frozen=True, kw_only=True):
    """The gRPC port by which other proxies have their requests admitted and routed.

    Who reaches it learns what replicas are sent, their keys included: with ``client_ca_file`` it accepts only
    proxies with a certificate of that authority.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65_535)] = 9002
    cert_file: str | None = None
    key_file: str | None = None
    client_ca_file: str | None = None
