"""Custom policies: how they are found, which are refused, and how failures are contained."""

from __future__ import annotations

import math
import os
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from policy.config.control import Choice
from policy.engine.replica_capacity import Capability
from policy.errors import ConfigError
from policy.scaling.policies.registry import choose
from policy.scaling.view import Policy, Proposal, Supply, View
from policy.signals.types import Signals
from serve.autoscaler.custom_policy import GuardedPolicy, beside, load, load_within
from tests.serve.plane import READY, SMALL, Plane
from tests.serve.sim_documents import document, sim_model
from tests.serve.traffic import Traffic, by_rate

VIEW = View(
    at=1.0, tick_s=5.0, model="m", mode="multi-replica", count=3, least=1, most=4, supply=Supply(),
    signals=Signals(), capability=Capability(mu=1.0, mu_max=1.0), lead_s=1.0,
)  # fmt: skip
ADDS = """
from policy.scaling.view import Proposal

class Adds:
    def __init__(self, more=1):
        self.more = more
    def decide(self, view, memory):
        return Proposal(count=view.count + self.more, reason="one more", memory={"n": 1})

class Bare:
    pass

def function(view, memory):
    pass
"""


def custom(folder: Path, text: str = ADDS, name: str = "Adds", **parameters: Any) -> Choice:
    file = folder / "mine.py"
    file.write_text(text)
    return {"custom": {"class": f"{file}:{name}", **parameters}}


def loaded(choice: Choice) -> Policy:
    return load(choose("p", choice), "models[m].control.policy")


def test_class_of_a_file_gets_its_parameters(tmp_path: Path) -> None:
    assert loaded(custom(tmp_path)).decide(VIEW, None).count == 4
    assert loaded(custom(tmp_path, more=2)).decide(VIEW, None).count == 5


def test_edited_file_is_loaded_again(tmp_path: Path) -> None:
    choice = custom(tmp_path)
    assert loaded(choice).decide(VIEW, None).reason == "one more"
    custom(tmp_path, ADDS.replace("one more", "some more"))
    os.utime(tmp_path / "mine.py", ns=(1, 1))
    assert loaded(choice).decide(VIEW, None).reason == "some more"


def test_edited_module_is_loaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "edited_policy_of_the_path.py"
    policies = []
    for number, count in enumerate(("7", "1 + 7", "1 + 7")):
        file.write_text(ADDS + f"\nCOUNT = {count}\n")
        os.utime(file, ns=(10**18 + min(number, 1) * 10**9,) * 2)
        policies.append(type(loaded({"custom": f"{file.stem}:Adds"})))
    module = sys.modules.pop(file.stem)
    assert module.COUNT == 8
    # An unchanged policy is not created again.
    assert policies[0] is not policies[1] is policies[2]


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        (ADDS, "Gone", "a class 'Gone' in .* with a method decide"),
        (ADDS, "Bare", "a class 'Bare' in .* with a method decide"),
        (ADDS, "function", "a class 'function' in .* with a method decide"),
        ("import nothing_of_this_name", "Adds", "a module that can be imported .*nothing_of_this_name"),
        ("this is no python", "Adds", "a module that can be imported .SyntaxError"),
        ("raise RuntimeError('no')", "Adds", "a module that can be imported .RuntimeError: no"),
        ("import sys; sys.exit('done')", "Adds", "a module that can be imported .SystemExit: done"),
    ],
)
def test_unloadable_policies_are_refused(tmp_path: Path, text: str, name: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as refused:
        loaded(custom(tmp_path, text, name))
    assert refused.value.path == "models[m].control.policy"
    assert str(refused.value.value).endswith(f"mine.py:{name}")


def test_unknown_parameters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"parameters that Adds takes .*'fewer'"):
        loaded(custom(tmp_path, fewer=1))
    with pytest.raises(ConfigError, match="a module that can be imported"):
        loaded({"custom": "no_such_module_here:Adds"})


class Answering:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def decide(self, view: View, memory: Any) -> Any:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (ZeroDivisionError("division by zero"), "raised ZeroDivisionError: division by zero"),
        (SystemExit("done"), "raised RuntimeError: SystemExit: done"),
        (None, "answered None, which is no Proposal"),
        (3, "answered 3, which is no Proposal"),
        (Proposal(count=-1, reason=""), "asked for -1 replicas"),
        (Proposal(count=2.5, reason=""), "asked for 2.5 replicas"),  # type: ignore[arg-type]
        (Proposal(count=True, reason=""), "asked for True replicas"),
        (Proposal(count=1, reason=None), "gave None as its reason"),  # type: ignore[arg-type]
        (Proposal(count=1, reason="", forecast=math.nan), "answered nan for 'forecast'"),
        (Proposal(count=1, reason="", terms={"a": math.inf}), "answered inf for 'a'"),
        (Proposal(count=1, reason="", memory=object()), "returned a memory that JSON cannot express"),
    ],
)
def test_invalid_proposals_leave_the_count(answer: Any, reason: str) -> None:
    events: list[str] = []
    # Only a user's policy, which runs in a thread of its own, may raise SystemExit.
    policy = GuardedPolicy(Answering(answer), events.append, alone=isinstance(answer, SystemExit))
    for _ in range(3):
        proposal = policy.decide(VIEW, {"kept": 1})
        assert (proposal.count, proposal.memory) == (3, {"kept": 1})
        assert reason in proposal.reason
    assert len(events) == 1
    assert reason in events[0]


def test_new_failure_is_reported_again() -> None:
    events: list[str] = []
    answering = Answering(ValueError("a"))
    policy = GuardedPolicy(answering, events.append)
    policy.decide(VIEW, None)
    answering.answer = Proposal(count=2, reason="well")
    assert policy.decide(VIEW, None).count == 2
    answering.answer = ValueError("a")
    policy.decide(VIEW, None)
    assert len(events) == 2


class Answers:
    """Blocks its caller until it is released; counts its calls in its memory."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.asked = 0

    def decide(self, view: View, memory: Any) -> Proposal:
        self.asked += 1
        memory["seen"].append(view.at)
        assert self.go.wait(60)
        return Proposal(count=4, reason="all", terms={"all": 4}, memory=memory)


def test_hanging_policy_is_called_once() -> None:
    events: list[str] = []
    answers, before = Answers(), set(threading.enumerate())
    policy = GuardedPolicy(answers, events.append, alone=True, patience_s=0.01)
    for _ in range(3):
        assert policy.decide(VIEW, {"seen": []}).count == 3
    assert (answers.asked, len(events)) == (1, 1)
    assert "no answer within 0.01 s; the count stays" in events[0]
    answers.go.set()
    for thread in set(threading.enumerate()) - before:
        thread.join()
    policy.patience_s = 60.0
    assert policy.decide(VIEW, {"seen": []}).count == 4


def test_policy_gets_a_copy_of_its_memory() -> None:
    answers = Answers()
    answers.go.set()
    memory: dict[str, Any] = {"seen": []}
    proposal = GuardedPolicy(answers, print, alone=True).decide(VIEW, memory)
    assert (proposal.memory, memory) == ({"seen": [1.0]}, {"seen": []})
    # As in the log.
    assert msgspec.json.encode(proposal.terms) == b'{"all":4.0}'


def test_module_beside_the_deployment_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    for name in ("mine.py", "inner/more.py"):
        (tmp_path / name).write_text(ADDS)
    here = tmp_path.resolve()
    assert beside({"custom": "mine:Adds"}, tmp_path) == {"custom": f"{here}/mine.py:Adds"}
    assert beside({"custom": {"class": "inner.more:Adds", "more": 2}}, tmp_path) == {
        "custom": {"class": f"{here}/inner/more.py:Adds", "more": 2}
    }
    for choice in ("predictive", {"static": {"replicas": 1}}, {"custom": "elsewhere:Adds"}, {"custom": 3}):
        assert beside(choice, tmp_path) == choice


async def test_deployment_with_an_unloadable_policy_is_refused(plane: Plane, tmp_path: Path) -> None:
    await plane.ready(document())
    changed = sim_model(control={"policy": custom(tmp_path, "raise RuntimeError('no')"), "tick_s": 1})
    with pytest.raises(ConfigError, match="RuntimeError: no"):
        plane.controller.apply(document(changed))
    assert plane.state.load(plane.state.deployment_path, dict[str, Any]) == document()
    assert plane.controller.status().models[0].decided_by == "predictive"


async def test_failing_policy_keeps_the_fleet(plane: Plane, tmp_path: Path) -> None:
    fails = ADDS.replace("return Proposal", "if view.count > 2:\n            1 / 0\n        return Proposal")
    control = {"tick_s": 1, "policy": custom(tmp_path, fails)}
    await Traffic.over(plane, document(sim_model(control=control)), 20, m=1.0)
    assert plane.counts(READY) == {SMALL: 3}
    events = [event for event in plane.controller.status().events if "ZeroDivisionError" in event]
    assert len(events) == 1
    assert "the count stays" in events[0]


async def test_static_replaces_a_missing_policy_after_a_restart(plane: Plane, tmp_path: Path) -> None:
    traffic = await Traffic.over(
        plane, document(sim_model(control={"tick_s": 1, "policy": by_rate(tmp_path)})), 10, m=3.0
    )
    (tmp_path / "by_rate.py").unlink()
    await plane.restart()
    await traffic.run(10, m=1.0)
    assert plane.counts(READY) == {SMALL: 3}
    assert plane.controller.status().models[0].decided_by == "static"
    assert any("static decides instead" in event for event in plane.controller.status().events)
    plane.controller.scale("m", 2)
    await traffic.run(2)
    assert plane.counts(READY) == {SMALL: 2}


DATA = """
from __future__ import annotations
from dataclasses import dataclass, KW_ONLY
import msgspec
from policy.scaling.view import Proposal

class Part(msgspec.Struct):
    step: Step

class Step(msgspec.Struct):
    size: int

@dataclass
class Adds:
    _: KW_ONLY
    more: int = 1
    def decide(self, view, memory):
        part = msgspec.convert({"step": {"size": self.more}}, Part)
        return Proposal(count=view.count + part.step.size, reason="one more")
"""


def test_files_of_one_name_may_have_data_classes(tmp_path: Path) -> None:
    """Their import failed, as the module was not found by its name."""
    policies = []
    for more in (2, 3):
        folder = tmp_path / str(more)
        folder.mkdir()
        policies.append(loaded(custom(folder, DATA.replace("= 1", f"= {more}"))))
    assert [policy.decide(VIEW, None).count for policy in policies] == [5, 6]


def test_module_that_cannot_be_imported_leaves_nothing(tmp_path: Path) -> None:
    before = set(sys.modules)
    with pytest.raises(ConfigError):
        loaded(custom(tmp_path, "raise SystemExit(3)"))
    assert not [name for name in set(sys.modules) - before if "mine" in name]


class Hanging:
    """Is not made before it may be."""

    may_be_made = threading.Event()

    def __init__(self) -> None:
        self.may_be_made.wait(60)

    def decide(self, view: View, memory: Any) -> Proposal:
        return view.hold(memory, "as it is")


async def test_static_replaces_a_policy_that_hangs_after_a_restart(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller started no control loop: nothing replaced replicas that died."""
    Hanging.may_be_made.set()
    control = {"tick_s": 1, "policy": {"custom": f"{__name__}:Hanging"}}
    await plane.ready(document(sim_model(control=control)))
    assert plane.controller.status().models[0].decided_by == f"{__name__}:Hanging"
    Hanging.may_be_made.clear()
    monkeypatch.setattr("serve.autoscaler.policies.LOAD_S", 0.01)
    await plane.restart()
    assert plane.controller.status().models[0].decided_by == "static"
    Hanging.may_be_made.set()


def test_a_module_that_hangs_keeps_no_other_from_being_loaded(tmp_path: Path) -> None:
    reading = tmp_path / "reading.py"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading.write_text(f"from pathlib import Path\nPath({str(pipe)!r}).read_text()\n{ADDS}")
    with pytest.raises(ConfigError, match=r"imported and made within 0\.01 s"):
        load_within(0.01, choose("p", {"custom": f"{reading}:Adds"}), "p")
    assert load_within(60.0, choose("p", custom(tmp_path)), "p").decide(VIEW, None).count == 4
    pipe.write_text("")  # it goes on


@pytest.mark.slow
async def test_queued_request_wakes_a_model_without_its_policy(plane: Plane, tmp_path: Path) -> None:
    modes = {"multi-replica": {"shape": "small", "replicas": {"min": 0, "max": 4}}}
    scale = {"zero_after_s": 10, "hold_s": 5, "standby": 1.0}
    control = {"tick_s": 1, "policy": by_rate(tmp_path), "scale": scale}
    traffic = await Traffic.over(plane, document(sim_model(modes=modes, control=control)), 10, m=1.0)
    await traffic.run(40, m=0.0)
    assert plane.counts() == {}
    (tmp_path / "by_rate.py").unlink()
    await plane.restart()
    traffic.queued["m"] = 1
    await traffic.run(4)
    assert plane.counts(READY) == {SMALL: 1}
