"""TLS by certificate files: contexts of our ports and of our own calls to them, and faults of the files."""

from __future__ import annotations

import contextlib
import re
import ssl
from pathlib import Path
from typing import Any

from policy.config.deployment import Deployment, GatewayConfig
from policy.config.grpc_ports import GrpcPort
from policy.config.tls import AdminTls, ServerTls
from policy.errors import ConfigError

_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_DAY_S = 86_400.0
# Messages of one side and then of the other until both have all; TLS 1.3 takes two.
_ROUNDS = 4


def server_context(files: ServerTls, path: str) -> ssl.SSLContext:
    """The TLS of the port whose section is at ``path`` in the deployment file.

    Raises :class:`policy.errors.ConfigError` for a file that cannot be read or does not fit the others.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    _load_pair(context, files.cert_file, files.key_file, f"{path}.cert_file", f"{path}.key_file")
    if isinstance(files, AdminTls) and files.client_ca_file is not None:
        at = f"{path}.client_ca_file"
        _read(files.client_ca_file, at)
        try:
            context.load_verify_locations(files.client_ca_file)
        except ssl.SSLError as error:
            raise _unusable(at, files.client_ca_file, error) from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(files: ServerTls, path: str) -> ssl.SSLContext:
    """For calls of this host to the port: only the certificate in its file is trusted, under any name.

    Raises :class:`policy.errors.ConfigError` as :func:`server_context` does.
    """
    at = f"{path}.cert_file"
    if (found := _CERTIFICATE.search(_read(files.cert_file, at))) is None:
        raise ConfigError(at, files.cert_file, "a certificate in PEM form")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        context.load_verify_locations(cadata=found[0])
    except ssl.SSLError as error:
        raise _unusable(at, files.cert_file, error) from None
    if isinstance(files, AdminTls) and files.client_ca_file is not None:
        if files.client_cert_file is not None and files.client_key_file is not None:
            at, key_at = f"{path}.client_cert_file", f"{path}.client_key_file"
            _load_pair(context, files.client_cert_file, files.client_key_file, at, key_at)
        else:
            _load_pair(context, files.cert_file, files.key_file, at, f"{path}.key_file")
    return context


def days_left(files: ServerTls | GrpcPort, path: str, at: float) -> float:
    """For how many days from ``at`` (Unix seconds) the port's certificate is valid, by a handshake in memory.

    Raises :class:`policy.errors.ConfigError` for files with which our own calls would fail.
    """
    if isinstance(files, GrpcPort):
        # Only others call it: their certificates are not here.
        server_context(tls_of(files), path)
        files = ServerTls(cert_file=str(files.cert_file), key_file=str(files.key_file))
    server, client = server_context(files, path), client_context(files, path)
    try:
        certificate = _handshake(server, client)
    except ssl.SSLCertVerificationError as error:
        expected = f"a certificate that is valid now ({error.verify_message})"
        raise ConfigError(f"{path}.cert_file", files.cert_file, expected) from None
    return (ssl.cert_time_to_seconds(str(certificate["notAfter"])) - at) / _DAY_S


def ports_with_tls(gateway: GatewayConfig) -> dict[str, ServerTls]:
    """The TLS of each port that has it, by the path of its section."""
    given = {"gateway.tls": gateway.tls, "gateway.admin_tls": gateway.admin_tls}
    return {path: files for path, files in given.items() if files is not None}


def every_port_with_tls(deployment: Deployment) -> dict[str, ServerTls | GrpcPort]:
    """The TLS of each port that has it, gRPC ports too, by the path of its section."""
    grpc = {path: port for path, port in deployment.grpc_ports.items() if port.cert_file is not None}
    return {**ports_with_tls(deployment.gateway), **grpc}


def tls_of(port: GrpcPort) -> AdminTls:
    """The files of a gRPC port that has TLS."""
    return AdminTls(
        cert_file=str(port.cert_file), key_file=str(port.key_file), client_ca_file=port.client_ca_file
    )


def _handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> dict[str, Any]:
    """The server's certificate as the client sees it."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = server.wrap_bio(to_server, to_client, server_side=True)
    theirs = client.wrap_bio(to_client, to_server)
    for _ in range(_ROUNDS):
        with contextlib.suppress(ssl.SSLWantReadError):
            theirs.do_handshake()
        try:
            ours.do_handshake()
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLCertVerificationError as error:
            expected = (
                f"that commands of this host have a certificate that it accepts ({error.verify_message})"
            )
            raise ConfigError("gateway.admin_tls.client_ca_file", "its authorities", expected) from None
    return theirs.getpeercert() or {}


def _load_pair(context: ssl.SSLContext, cert: str, key: str, cert_at: str, key_at: str) -> None:
    for file, at in ((cert, cert_at), (key, key_at)):
        _read(file, at)
    try:
        # Without a password OpenSSL would ask for that of an encrypted key at the terminal.
        context.load_cert_chain(cert, key, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(key_at, key, f"the private key of {cert_at}") from None
        expected = f"a private key without a passphrase, and in {cert_at} a certificate, in PEM form"
        raise ConfigError(key_at, key, f"{expected} ({error.reason or error})") from None


def _read(file: str, at: str) -> str:
    try:
        return Path(file).read_text(errors="replace")
    except OSError as error:
        raise ConfigError(at, file, f"a file that can be read ({error.strerror})") from error


def _unusable(at: str, file: str, error: ssl.SSLError) -> ConfigError:
    return ConfigError(at, file, f"certificates in PEM form ({error.reason or error})")
