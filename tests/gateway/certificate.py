"""Self-signed certificates for servers of tests."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


def certify(certificate: Path, *, days: float = 1) -> ssl.SSLContext:
    """The TLS of a server at 127.0.0.1 with a self-signed certificate, written to ``certificate``.

    It ends in so many ``days``. Its key is written beside it, as ``.key``.
    """
    key = certificate.with_suffix(".key")
    own = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "upstream")])
    today = datetime.now(UTC)
    signed = (
        x509.CertificateBuilder(name, name, own.public_key(), x509.random_serial_number())
        .not_valid_before(today - timedelta(days=9))
        .not_valid_after(today + timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(own, hashes.SHA256())
    )
    certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    private = serialization.PrivateFormat.PKCS8
    key.write_bytes(own.private_bytes(serialization.Encoding.PEM, private, serialization.NoEncryption()))
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    return tls
