"""The arguments of simulated calls fit the schemas that agents have: pydantic's, and odd ones."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, Field

from serve.engine.sim.tool_calls import FunctionDefinition, ToolSet


class City(BaseModel):
    name: str
    near: list[City] = []
    capital_of: City | None


class Trip(BaseModel):
    to: City
    legs: list[City]
    days: int = Field(ge=1, le=2)
    people: int = Field(gt=0)
    floor: int = Field(lt=0)
    share: float = Field(gt=0, lt=1)
    degrees: float = Field(le=-10)


def arguments(schema: dict[str, Any], seed: int) -> str:
    called = ToolSet([FunctionDefinition("plan", parameters=schema)], "required").call(seed)
    assert called is not None
    return called[1]


def test_arguments_fit_the_schema_of_a_model() -> None:
    trips = [Trip.model_validate_json(arguments(Trip.model_json_schema(), seed)) for seed in range(50)]
    assert {trip.days for trip in trips} == {1, 2}


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ({"type": "string", "minimum": None}, str),
        ({"type": "string", "minimum": "a"}, str),
        ({"type": "integer", "minimum": "a", "maximum": None}, int),
        ({"type": "number", "minimum": 1, "exclusiveMinimum": True}, float),
        ({"type": "integer", "minimum": 2, "maximum": 1}, int),
        ({"$ref": "#/$defs/missing"}, str),
        ({"$ref": "#"}, dict),
        ({"$ref": 5}, dict),
    ],
)
def test_a_schema_that_makes_no_sense_has_some_arguments(schema: dict[str, Any], kind: type) -> None:
    given = json.loads(arguments({"type": "object", "properties": {"a": schema}}, 1))
    assert isinstance(given["a"], kind)
