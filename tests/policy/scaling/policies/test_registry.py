"""A policy is chosen by name, with parameters, or refused with path, value and expectation."""

from __future__ import annotations

from typing import Any

import pytest

from policy.deployment_file.parse import parse
from policy.errors import ConfigError
from policy.scaling.policies.registry import BUILTIN, choose, make
from tests.policy.example_documents import EXTERNAL, GOOD, changed


@pytest.mark.parametrize(("name", "kind"), BUILTIN.items())
def test_each_name_makes_its_policy(name: str, kind: type) -> None:
    for raw in (name, {name: None}, {name: {}}):
        chosen = choose("policy", raw)
        assert (chosen.name, chosen.label) == (name, name)
        assert type(make(chosen)) is kind


@pytest.mark.parametrize(
    ("raw", "class_path", "arguments"),
    [
        ({"custom": "my_policies:Steps"}, "my_policies:Steps", {}),
        ({"custom": {"class": "a.b.c:Steps"}}, "a.b.c:Steps", {}),
        ({"custom": {"class": "a:B", "each": 4, "names": ["x"]}}, "a:B", {"each": 4, "names": ["x"]}),
    ],
)
def test_a_custom_class_is_named_and_not_loaded(raw: Any, class_path: str, arguments: dict[str, Any]) -> None:
    chosen = choose("policy", raw)
    assert (chosen.name, chosen.class_path, chosen.arguments) == ("custom", class_path, arguments)
    assert chosen.label == class_path


AT = "models[0].control"
REFUSED = [
    ("predictiv", f"{AT}.policy", "predictiv", "did you mean 'predictive'?"),
    ("hpa", f"{AT}.policy", "hpa", "panic_window, token_saturation, predictive, custom"),
    ({"static": {}, "predictive": {}}, f"{AT}.policy", None, "that one name"),
    ({}, f"{AT}.policy", {}, "the name of a policy"),
    ({"statc": {}}, f"{AT}.policy", "statc", "did you mean 'static'?"),
    ({"static": {"replica": 2}}, f"{AT}.policy.static.replica", 2, "did you mean 'replicas'?"),
    ({"static": {"replicas": -1}}, f"{AT}.policy.static.replicas", -1, ">= 0"),
    ({"static": 3}, f"{AT}.policy.static", 3, "object"),
    ({"target_tracking": {"metric": "cpu"}}, f"{AT}.policy.target_tracking.metric", "cpu", "queue, kv_used"),
    ({"target_tracking": {"target": 0}}, f"{AT}.policy.target_tracking.target", 0, "> 0"),
    ({"target_tracking": {"tolerance": 2}}, f"{AT}.policy.target_tracking.tolerance", 2, "<= 1"),
    ({"panic_window": {"panic": 1}}, f"{AT}.policy.panic_window.panic", 1, "> 1"),
    ({"panic_window": {"utilisation": 1.5}}, f"{AT}.policy.panic_window.utilisation", 1.5, "<= 1"),
    ({"token_saturation": {"queue": 0}}, f"{AT}.policy.token_saturation.queue", 0, ">= 1"),
    ({"token_saturation": {"scale_down": 0.9}}, f"{AT}.policy.token_saturation", None, "scale_up = 0.85"),
    ({"predictive": {"quantile": 1}}, f"{AT}.policy.predictive.quantile", 1, "<= 0.999"),
    ({"predictive": {"drain_s": 0}}, f"{AT}.policy.predictive.drain_s", 0, "> 0"),
    ({"predictive": {"margin": "much"}}, f"{AT}.policy.predictive.margin", "much", "float"),
    ("custom", f"{AT}.policy", None, "module:Class"),
    ({"custom": "Steps"}, f"{AT}.policy.custom", "Steps", "module:Class"),
    ({"custom": {"each": 4}}, f"{AT}.policy.custom.class", None, "module:Class"),
    ({"custom": {"class": "a:B", "4": 4}}, f"{AT}.policy.custom.4", 4, "argument"),
]  # fmt: skip


@pytest.mark.parametrize(("raw", "path", "value", "expected"), REFUSED, ids=[str(row[0]) for row in REFUSED])
def test_invalid_choices_are_refused(raw: Any, path: str, value: Any, expected: str) -> None:
    for key in ("policy", "shadow"):
        with pytest.raises(ConfigError) as caught:
            parse(changed(GOOD, f"{AT}.{key}", raw))
        assert caught.value.path == path.replace(".policy", f".{key}")
        assert expected in caught.value.expected
        if value is not None:
            assert caught.value.value == value


def test_external_models_are_checked_too() -> None:
    with pytest.raises(ConfigError, match="did you mean 'static'"):
        parse(changed(EXTERNAL, f"{AT}.policy", "statik"))
