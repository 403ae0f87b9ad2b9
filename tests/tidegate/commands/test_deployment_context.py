"""What commands know of a deployment: its controller, and the admin token, which stays on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from policy.errors import Unreachable
from serve.controller.client import ControllerClient
from store.state_dir import StateDir
from tests.policy.example_documents import EXTERNAL, GOOD
from tidegate.commands.deployment_context import admin_token, controller_client


@pytest.mark.parametrize(
    ("host", "given", "sent"),
    [
        ("127.0.0.1", "", "own"), ("[::1]", "", "own"), ("localhost", "", "own"), ("ops.example", "", "own"),
        ("gateway.example", "", ""), ("10.0.0.1", "", ""), ("localhost.example", "", ""),
        ("127.0.0.1", "other", "other"), ("gateway.example", "other", "other"),
    ],
)  # fmt: skip
def test_the_token_for_a_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, given: str, sent: str
) -> None:
    state = StateDir(tmp_path)
    monkeypatch.setenv("TIDEGATE_ADMIN_TOKEN", given)
    assert admin_token(state, f"http://{host}:8081") == given  # none was made, and none is made here
    assert not state.admin_token_path.exists()
    state.save(state.deployment_path, {**EXTERNAL, "gateway": {"admin_host": "ops.example"}})
    own = state.admin_token()
    assert admin_token(state, f"http://{host}:8081") == (own if sent == "own" else sent)


def test_the_controller_of_a_joined_cluster_outlives_the_supervisor(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    state.save(state.deployment_path, GOOD)
    with pytest.raises(Unreachable, match="Nothing is running"):
        controller_client(state)
    state.save(
        state.deployment_path,
        {**GOOD, "cluster": {"address": "10.0.0.1:6379", "controller": "10.0.0.1:7070"}},
    )
    assert isinstance(controller_client(state), ControllerClient)
