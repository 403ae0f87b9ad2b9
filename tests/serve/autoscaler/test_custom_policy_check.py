"""A user's policy that does not answer on a sample view."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from policy.deployment_file.parse import parse
from policy.errors import ConfigError
from policy.scaling.view import Proposal, View
from serve.autoscaler.custom_policy_check import rehearse


class Waiting:
    """Answers when it may."""

    may_answer = threading.Event()
    calls = 0

    def decide(self, view: View, memory: Any) -> Proposal:
        Waiting.calls += 1
        self.may_answer.wait(60)
        return view.hold(memory, "as it is")


def test_a_policy_that_hangs_is_refused_and_not_called_again_before_it_has_answered(tmp_path: Path) -> None:
    model = {
        "name": "m", "engine": "sim", "shapes": {"small": {"cpus": 1}}, "modes": {"one": {"shape": "small"}},
        "control": {"policy": {"custom": f"{__name__}:Waiting"}},
    }  # fmt: skip
    (spec,) = parse({"models": [model]}).models
    for _ in range(3):
        with pytest.raises(ConfigError, match=r"it raised TimeoutError: no answer within 0\.01 s") as refused:
            rehearse(spec, patience_s=0.01)
        assert refused.value.path == "models[m].control.policy"
    assert Waiting.calls == 1
    Waiting.may_answer.set()
    waiting = [thread for thread in threading.enumerate() if thread.name == "policy"]
    for thread in waiting:
        thread.join(60)
    rehearse(spec)
    assert Waiting.calls == 3
