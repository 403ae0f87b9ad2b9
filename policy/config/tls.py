"""TLS of the gateway's ports, by files in PEM form that are read again when they change."""

from __future__ import annotations

from policy.config.control import Section


class ServerTls(Section, frozen=True, kw_only=True):
    """The certificate of a port, with its chain, and its private key without a passphrase."""

    cert_file: str
    key_file: str


class AdminTls(ServerTls, frozen=True, kw_only=True):
    """TLS of the admin port.

    With ``client_ca_file`` every caller needs a certificate of one of its authorities. Commands of this host
    present ``client_cert_file`` with ``client_key_file``; without them the port's own.
    """

    client_ca_file: str | None = None
    client_cert_file: str | None = None
    client_key_file: str | None = None
