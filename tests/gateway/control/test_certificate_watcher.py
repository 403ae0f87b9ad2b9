"""The certificates of the ports, whose files are read again when they change."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

from gateway.control.certificate_watcher import Certificates
from gateway.telemetry.structured_log import StructuredLog
from policy.config.deployment import GatewayConfig
from tests.gateway.control.test_deployment_file_watcher import no_file_descriptors
from tests.store.test_tls_files import pair

LOOKS = 3


def test_a_certificate_that_could_not_be_read_is_read_at_a_later_look(tmp_path: Path) -> None:
    """It counted as read, and the one before stayed in force until it ended."""
    mine, new = (pair(tmp_path / f"{name}.pem") for name in ("mine", "new"))
    stream = io.StringIO()
    certificates = Certificates(GatewayConfig(tls=mine), StructuredLog(0, stream))
    current = certificates.of("gateway.tls")
    assert current is not None
    first = current()

    def look() -> None:
        for _ in range(LOOKS):
            certificates.look()

    shutil.copy(new.cert_file, mine.cert_file)
    look()  # its key is another
    shutil.copy(new.key_file, mine.key_file)
    with no_file_descriptors():
        look()
    assert current() is first
    assert stream.getvalue().count("certificate_refused") == 2
    look()
    assert current() is not first
    assert stream.getvalue().count("certificate_read") == 1
