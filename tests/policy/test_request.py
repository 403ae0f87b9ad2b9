"""The lengths of a model's answers."""

from __future__ import annotations

import random

from policy.request import AnswerLength


def test_few_answers_are_longer_than_a_long_one() -> None:
    draw, answers = random.Random(3), AnswerLength()  # noqa: S311
    lengths = [draw.choice([100, 100, 200, 200, 400, 400, 600, 5000]) for _ in range(2000)]
    for tokens in lengths:
        answers.learn(tokens)
    assert 600 < answers.mean < 1200
    assert 3500 < answers.long() <= 5000
    for _ in range(2000):
        answers.learn(100)
    assert answers.long() < 110


def test_long_answers_are_known_for_each_size_of_the_limit() -> None:
    answers = AnswerLength()
    assert answers.long(4000) == 4000
    for _ in range(100):
        answers.learn(30, 32)
    answers.learn(3900, 4000)
    for _ in range(100):
        answers.learn(30, 32)
    assert answers.long(32) == 30
    assert answers.long(3950) == 3900
    assert answers.long(3000) == 3000
    # Nothing is known of limits of another size.
    assert answers.long(500) == 500
