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
    assert 3500 < answers.long <= 5000
    for _ in range(2000):
        answers.learn(100)
    assert answers.long < 110
