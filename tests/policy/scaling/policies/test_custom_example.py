"""The policy example of the documentation: it loads, takes its documented arguments, and decides."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
import yaml

from policy.scaling.policies.registry import choose
from policy.scaling.view import Policy
from tests.policy.scaling.views import START, demand, proposals, view

EXAMPLE = Path(__file__).parents[4] / "docs" / "examples" / "custom_policy.py"
HOUR_S = 3600.0


@pytest.fixture(scope="module")
def shipped() -> ModuleType:
    spec = importlib.util.spec_from_file_location("custom_policy", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def policy(shipped: ModuleType) -> Policy:
    """The policy that the YAML in its docstring configures."""
    indented = re.search(r"    control:.*?\n\n", shipped.__doc__ or "", re.DOTALL)
    assert indented is not None
    chosen = choose("policy", yaml.safe_load(indented.group())["control"]["policy"])
    module, _, name = chosen.class_path.partition(":")
    assert module == EXAMPLE.stem
    made: Policy = getattr(shipped, name)(**chosen.arguments)
    return made


def test_the_count_follows_the_hour_of_the_day(policy: Policy) -> None:
    midnight = -(START % 86_400.0)
    counts = [policy.decide(view(demand(1.0), at=midnight + hour * HOUR_S), None).count for hour in range(24)]
    assert counts == [1] * 8 + [4] * 12 + [1] * 4


def test_a_replica_is_added_while_requests_keep_waiting(policy: Policy) -> None:
    noon = 12 * HOUR_S - START % 86_400.0
    queues = [0, 3, 3, 3, 3, 0, 3]
    rows = [(noon + 15.0 * i, demand(1.0, queued=queued)) for i, queued in enumerate(queues)]
    found = proposals(policy, rows)
    assert [proposal.count for proposal in found] == [4, 4, 4, 5, 5, 4, 4]
    assert found[4].reason == "4 at 12 o'clock, and 1 more for requests that wait since 45 s"
    assert msgspec.json.decode(msgspec.json.encode(found[4].memory)) == found[4].memory


def test_without_signals_the_hour_still_decides(policy: Policy) -> None:
    assert policy.decide(view(None, at=12 * HOUR_S - START % 86_400.0), None).count == 4


@pytest.mark.parametrize(
    "arguments", [{"day": 1, "night": 2}, {"day": 1, "opens": 9, "closes": 9}, {"day": 1, "patience_s": 0.0}]
)
def test_invalid_arguments_are_refused(shipped: ModuleType, arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        shipped.ByTheClock(**arguments)
