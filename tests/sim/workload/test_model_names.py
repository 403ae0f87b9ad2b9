"""Whom requests are for, by the names that a trace has for models."""

from __future__ import annotations

import pytest

from policy.errors import ConfigError
from sim.arrival import Arrival
from sim.workload.survey import ModelNames


def test_a_name_is_that_model_and_none_is_the_first() -> None:
    several = ModelNames(["m", "n"])
    assert several.of(Arrival(0.0, 1, 1, model="n")) == "n"
    assert several.of(Arrival(0.0, 1, 1)) == "m"
    assert several.description() == ""


def test_one_of_several_has_to_be_named_as_it_is() -> None:
    with pytest.raises(ConfigError, match="got 'GPT-4', expected one of: m, n"):
        ModelNames(["m", "n"]).of(Arrival(0.0, 1, 1, model="GPT-4"))


def test_the_only_model_takes_all_and_says_so() -> None:
    only = ModelNames(["m"])
    names = ("GPT-4", "m", "", "ChatGPT", "GPT-4")
    assert {only.of(Arrival(0.0, 1, 1, model=name)) for name in names} == {"m"}
    assert only.description() == "m: takes the requests for ChatGPT, GPT-4, as the only model"
