"""Certificate files: what fits, and what is said about those that do not."""

from __future__ import annotations

import ssl
import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from policy.config.grpc_ports import EndpointPicker
from policy.config.tls import AdminTls, ServerTls
from policy.errors import ConfigError
from store.tls_files import client_context, days_left, server_context
from tests.gateway.certificate import certify

PATH = "gateway.admin_tls"


def pair(file: Path, **more: str) -> AdminTls:
    certify(file, days=20)
    return AdminTls(cert_file=str(file), key_file=str(file.with_suffix(".key")), **more)


def test_the_days_of_a_certificate_are_counted(tmp_path: Path) -> None:
    assert days_left(pair(tmp_path / "a.pem"), PATH, time.time()) == pytest.approx(20, abs=0.1)


def test_a_port_speaks_tls_from_1_2_on_without_compression_and_renegotiation(tmp_path: Path) -> None:
    context = server_context(pair(tmp_path / "a.pem"), PATH)
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert context.options & ssl.OP_NO_COMPRESSION
    assert context.options & ssl.OP_NO_RENEGOTIATION


def test_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    mine, other = pair(tmp_path / "mine.pem"), pair(tmp_path / "other.pem")
    text, late = tmp_path / "text", tmp_path / "late.pem"
    text.write_text("no certificate")
    certify(late, days=-1)
    key = serialization.load_pem_private_key((tmp_path / "mine.key").read_bytes(), None)
    hidden = tmp_path / "hidden.key"
    hidden.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    for cert, keys, path, expected in (
        (mine.cert_file, other.key_file, ".key_file", "the private key of"),
        (str(tmp_path / "none"), mine.key_file, ".cert_file", "can be read"),
        (mine.cert_file, str(tmp_path / "none"), ".key_file", "can be read"),
        (str(text), mine.key_file, ".key_file", "PEM form"),
        (mine.cert_file, str(hidden), ".key_file", "without a passphrase"),
        (str(late), str(late.with_suffix(".key")), ".cert_file", "expired"),
    ):
        with pytest.raises(ConfigError, match=expected) as caught:
            days_left(ServerTls(cert_file=cert, key_file=keys), PATH, time.time())
        assert caught.value.path == PATH + path


def test_only_the_certificate_of_the_file_is_trusted_and_client_certificates_are_checked(
    tmp_path: Path,
) -> None:
    mine, other = pair(tmp_path / "mine.pem"), pair(tmp_path / "other.pem")
    mutual = AdminTls(cert_file=mine.cert_file, key_file=mine.key_file, client_ca_file=other.cert_file)
    with pytest.raises(ConfigError, match="commands of this host") as caught:
        days_left(mutual, PATH, time.time())
    assert caught.value.path == "gateway.admin_tls.client_ca_file"
    as_other = AdminTls(
        cert_file=mine.cert_file, key_file=mine.key_file, client_ca_file=other.cert_file,
        client_cert_file=other.cert_file, client_key_file=other.key_file,
    )  # fmt: skip
    assert days_left(as_other, PATH, time.time()) > 19
    with pytest.raises(ConfigError, match="PEM form"):
        client_context(ServerTls(cert_file=mine.key_file, key_file=mine.key_file), PATH)


def test_the_files_of_a_grpc_port_are_checked_without_certificates_of_its_clients(tmp_path: Path) -> None:
    mine, other = pair(tmp_path / "mine.pem"), pair(tmp_path / "other.pem")
    late, text = tmp_path / "late.pem", tmp_path / "text"
    certify(late, days=-1)
    text.write_text("no certificate")

    def days(cert: str, key: str, ca: str) -> float:
        port = EndpointPicker(cert_file=cert, key_file=key, client_ca_file=ca)
        return days_left(port, "endpoint_picker", time.time())

    assert days(mine.cert_file, mine.key_file, other.cert_file) == pytest.approx(20, abs=0.1)
    for cert, key, ca, at, expected in (
        (mine.cert_file, other.key_file, other.cert_file, "key_file", "the private key of"),
        (str(late), str(late.with_suffix(".key")), other.cert_file, "cert_file", "expired"),
        (mine.cert_file, mine.key_file, str(text), "client_ca_file", "PEM form"),
        (mine.cert_file, mine.key_file, str(tmp_path / "none"), "client_ca_file", "can be read"),
    ):
        with pytest.raises(ConfigError, match=expected) as caught:
            days(cert, key, ca)
        assert caught.value.path == f"endpoint_picker.{at}"
