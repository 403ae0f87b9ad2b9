"""A survey counts the requests of each model."""

from __future__ import annotations

from sim.arrivals import Arrival
from sim.workload.per_model_load import ModelNames, trace_load


def test_requests_are_counted_by_model_and_second() -> None:
    found = trace_load(
        iter(
            [
                Arrival(0.2, 10, 1),
                Arrival(0.9, 20, 2),
                Arrival(3.5, 30, 3, model="n", adapter="a", blocks=(1,)),
            ]
        ),
        ModelNames(["m", "n"]),
    )
    assert found.ends_at == 3.5 and list(found.loads) == ["m", "n"]
    one, other = found.loads["m"], found.loads["n"]
    assert (one.requests, one.input_tokens, one.output_tokens, one.related) == (2, 30, 3, False)
    assert dict(one.seconds) == {0: 2} and dict(other.seconds) == {3: 1} and other.related
    assert (one.adapted, other.adapted) == (0, 1)


def test_requests_beyond_the_context_length_are_counted() -> None:
    asked = [Arrival(float(i), tokens, 48) for i, tokens in enumerate([1952, 1953, 4000])]
    addressing = ModelNames(["m"])
    assert trace_load(asked, addressing, {"m": 2000}).loads["m"].too_long == 2
    assert trace_load(asked, addressing, {"n": 2000}).loads["m"].too_long == 0


def test_an_empty_trace_has_no_load() -> None:
    assert trace_load([], ModelNames(["m"])).loads == {}


def test_the_only_model_takes_all_requests_and_reports_it() -> None:
    only = ModelNames(["m"])
    names = ("GPT-4", "m", "", "ChatGPT", "GPT-4")
    assert {only.of(Arrival(0.0, 1, 1, model=name)) for name in names} == {"m"}
    assert only.description() == "m: takes the requests for ChatGPT, GPT-4, as the only model"
