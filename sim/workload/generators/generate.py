"""Requests that are made up: their instants, lengths, adapters and conversations, the same for one seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator

from policy.config.control import Section
from sim.arrival import Arrival
from sim.workload.generators.arrivals import RateShape, arrival_times
from sim.workload.generators.conversations import Conversations, ConversationState, check_conversations
from sim.workload.generators.lengths import Length, check_length, sample_length
from sim.workload.generators.popularity import Popularity, check_popularity, sample_adapter


class GeneratedWorkload(Section, frozen=True):
    """Requests that come as ``arrivals`` say, with lengths of their own.

    With ``conversations`` an arrival is the first turn of one; ``input_tokens`` are then what each turn adds.
    """

    arrivals: RateShape
    input_tokens: Length
    output_tokens: Length
    adapters: Popularity | None = None
    conversations: Conversations | None = None


def check_workload(path: str, spec: GeneratedWorkload) -> None:
    """Refuse what contradicts itself; raises :class:`policy.errors.ConfigError`."""
    check_length(f"{path}.input_tokens", spec.input_tokens)
    check_length(f"{path}.output_tokens", spec.output_tokens)
    if spec.adapters is not None:
        check_popularity(f"{path}.adapters", spec.adapters)
    if spec.conversations is not None:
        check_conversations(f"{path}.conversations", spec.conversations)


def generate(
    spec: GeneratedWorkload, seed: str, until_s: float, trace: Callable[[str], Iterable[Arrival]]
) -> Iterator[Arrival]:
    """The requests of ``until_s`` seconds; ``trace`` reads the one at a path.

    What is drawn has a stream of its own: another length moves no arrival.
    """
    at = arrival_times(spec.arrivals, _stream(seed, "arrivals"), until_s)
    question = sample_length(
        spec.input_tokens,
        _stream(seed, "input"),
        lambda path: (each.input_tokens for each in trace(path)),
    )
    answered = sample_length(
        spec.output_tokens,
        _stream(seed, "output"),
        lambda path: (each.output_tokens for each in trace(path)),
    )
    adapter = sample_adapter(spec.adapters, _stream(seed, "adapters"))
    if spec.conversations is not None:
        rng = _stream(seed, "conversations")
        return ConversationState(spec.conversations, rng, question, answered, adapter).turns(at)
    return (Arrival(each, question(), answered(), adapter=adapter()) for each in at)


def _stream(seed: str, name: str) -> random.Random:
    return random.Random(f"{seed} {name}")  # noqa: S311 - a reproducible workload
