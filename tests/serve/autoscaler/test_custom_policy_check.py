"""A user's policy that does not answer on a sample view."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from policy.deployment_file.parse import parse
from policy.errors import ConfigError
from policy.scaling.view import Proposal, View
from serve.autoscaler.custom_policy_check import check_custom_policy


class Waiting:
    """Answers when it may."""

    may_answer = threading.Event()
    calls = 0

    def decide(self, view: View, memory: Any) -> Proposal:
        Waiting.calls += 1
        self.may_answer.wait(60)
        return view.hold(memory, "as it is")


def model_with(policy: str) -> dict[str, Any]:
    return {
        "name": "m", "engine": "sim", "shapes": {"small": {"cpus": 1}}, "modes": {"one": {"shape": "small"}},
        "control": {"policy": {"custom": f"{__name__}:{policy}"}},
    }  # fmt: skip


def test_a_policy_that_hangs_is_refused_and_not_called_again_before_it_has_answered() -> None:
    (spec,) = parse({"models": [model_with("Waiting")]}).models
    for _ in range(3):
        with pytest.raises(ConfigError, match=r"it raised TimeoutError: no answer within 0\.01 s") as refused:
            check_custom_policy(spec, patience_s=0.01)
        assert refused.value.path == "models[m].control.policy"
    assert Waiting.calls == 1
    Waiting.may_answer.set()
    waiting = [thread for thread in threading.enumerate() if thread.name == "policy"]
    for thread in waiting:
        thread.join(60)
    check_custom_policy(spec)
    assert Waiting.calls == 3


class Hanging(Waiting):
    """Is not made before it may be."""

    may_be_made = threading.Event()

    def __init__(self) -> None:
        Waiting.calls += 1
        self.may_be_made.wait(60)


def test_a_policy_that_is_not_made_is_refused_and_not_tried_again_meanwhile() -> None:
    """It held up every later change of the deployment, and the end of the supervisor."""
    (spec,) = parse({"models": [model_with("Hanging")]}).models
    Waiting.calls = 0
    for _ in range(3):
        with pytest.raises(ConfigError, match=r"imported and made within 0\.01 s"):
            check_custom_policy(spec, load_s=0.01)
    assert Waiting.calls == 1
    Hanging.may_be_made.set()
    for thread in [thread for thread in threading.enumerate() if "is loaded" in thread.name]:
        thread.join(60)
    Waiting.may_answer.set()
    check_custom_policy(spec)
