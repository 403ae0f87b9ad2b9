"""Equivalence classes: of random requests that come and go, against sorting all of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policy.admission.equivalence_classes import EquivalenceClasses, key_of
from policy.request import Request

REQUEST = st.builds(
    Request,
    st.just("m"),
    adapter=st.sampled_from(["", "a", "b"]),
    prompt_tokens=st.integers(0, 5),
    output_tokens=st.integers(0, 5),
    long_tokens=st.integers(0, 9),
    avoid=st.sets(st.sampled_from("rs")),
)


@given(st.lists(st.tuples(REQUEST, st.integers(0, 3), st.booleans()), max_size=40))
def test_classes_follow_the_requests_that_wait(steps: list[tuple[Request, int, bool]]) -> None:
    classes = EquivalenceClasses()
    waiting: list[Request] = []
    for ticket, (request, gone, looks) in enumerate(steps):
        request.ticket = ticket
        classes.add(request)
        waiting.append(request)
        for each in waiting[:gone]:
            classes.remove(each)
            classes.remove(each)  # a second time changes nothing
        del waiting[:gone]
        if not looks:
            continue
        of_each = {key_of(each): [r for r in waiting if key_of(r) == key_of(each)] for each in waiting}
        assert set(classes.by_adapter) == {each.adapter for each in waiting}
        for adapter in "", "a", "b":
            of_adapter = [each for each in waiting if each.adapter == adapter]
            assert sorted(r.ticket for r in classes.of(adapter)) == [r.ticket for r in of_adapter]
        samples = list(classes.samples(classes.by_adapter, shortest=False))
        assert all(sample in of_each[key_of(sample)] for sample in samples)
        shortest = {key_of(each): each for each in classes.samples(classes.by_adapter, shortest=True)}
        assert shortest.keys() == of_each.keys()
        for key, requests in of_each.items():
            least = shortest[key]
            assert least.prompt_tokens == min(r.prompt_tokens for r in requests)
            assert least.output_tokens == min(r.output_tokens for r in requests)
            assert least.long_tokens == min(r.long_tokens for r in requests)
