"""The declared shape and mode of a server, by what is said of it."""

from __future__ import annotations

import pytest

from policy.config.external_servers import ServerSettings, server_shape

SHAPES = ("big", "small")
MODES = {"one": "big", "many": "small", "night": "small"}
Given = tuple[str, str, str]


@pytest.mark.parametrize(
    ("given", "built"),
    # Shape, mode and the shape of its workload; shape and mode.
    [
        (("", "", ""), ("", "")),
        (("big", "", ""), ("big", "one")),
        (("small", "", ""), ("small", "")),
        (("", "night", ""), ("small", "night")),
        (("small", "many", ""), ("small", "many")),
        (("", "", "big"), ("big", "one")),
        (("small", "night", "small"), ("small", "night")),
    ],
)
def test_shape_and_mode_follow_from_each_other(given: Given, built: tuple[str, str]) -> None:
    shape, mode, known = given
    assert server_shape(ServerSettings(shape=shape, mode=mode), SHAPES, MODES, "", known) == (
        *built,
        None,
    )


def test_a_single_shape_is_that_of_every_server() -> None:
    assert server_shape(ServerSettings(), ("only",), {}, "") == ("only", "", None)


@pytest.mark.parametrize(
    ("given", "built", "problem"),
    [
        (("huge", "", ""), ("", ""), "pod p: shape: got 'huge', expected one of the shapes: big, small"),
        (("huge", "one", ""), ("big", "one"),
         "pod p: shape: got 'huge', expected one of the shapes: big, small"),
        (("big", "day", ""), ("big", "one"),
         "pod p: mode: got 'day', expected one of the modes: one, many, night"),
        (("big", "many", ""), ("big", "one"), "pod p: mode: got 'many', expected a mode of the shape big"),
        (("small", "", "big"), ("big", "one"),
         "pod p: shape: got 'small', expected big, the shape of its workload, or a mode of it"),
        (("", "many", "big"), ("big", "one"),
         "pod p: mode: got 'many', expected big, the shape of its workload, or a mode of it"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_and_not_used(given: Given, built: tuple[str, str], problem: str) -> None:
    shape, mode, known = given
    found = server_shape(ServerSettings(shape=shape, mode=mode), SHAPES, MODES, "pod p: ", known)
    assert (found[:2], str(found.problem)) == (built, problem)
