"""The command line's client of an accounting process that hangs."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from gateway.accounting.cli_client import AccountingClient
from policy.errors import Unreachable
from store.state_dir import StateDir


@pytest.mark.slow
@pytest.mark.timeout(20)
def test_a_status_waits_less_for_a_process_that_hangs_than_a_change_does(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.fspath(state.accounting_socket_path))
        listening.listen()
        with pytest.raises(Unreachable, match="does not answer: timed out"):
            AccountingClient(state).ledger()
