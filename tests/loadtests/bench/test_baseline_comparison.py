"""The comparison of two endpoints: its ratios, its targets, and both measured over loopback."""

from __future__ import annotations

import msgspec
import pytest

from loadtests.bench.baseline_comparison import (
    BASELINE,
    GATEWAY,
    BaselineComparison,
    BaselineRound,
    main,
    rendered,
)
from tests.tidegate.replay.endpoint import Endpoint


def rounds(*pairs: tuple[float, float, float, float], errors: int = 0) -> list[dict[str, BaselineRound]]:
    """Rounds of the tokens per second of both sides, then their TTFT."""
    return [
        {BASELINE: BaselineRound(theirs, their_ttft_s, 1), GATEWAY: BaselineRound(ours, our_ttft_s, errors)}
        for theirs, ours, their_ttft_s, our_ttft_s in pairs
    ]


def test_ratios_are_of_each_round_and_their_median_counts() -> None:
    # The machine was half as fast in the second round: each ratio is of one round.
    found = BaselineComparison.of(16, rounds((100, 95, 0.1, 0.11), (50, 48, 0.2, 0.21), (100, 40, 0.1, 0.5)))
    assert found.throughput_ratio.median == 0.95
    assert found.ttft_ratio.median == pytest.approx(1.1)
    assert found.errors == {BASELINE: 3, GATEWAY: 0}
    assert "| 16 | 100 (50-100) | 48 (40-95) |" in rendered([found])


@pytest.mark.parametrize(
    ("ours", "ttft_s", "errors", "met"),
    [(90, 0.12, 0, True), (89, 0.12, 0, False), (90, 0.13, 0, False), (90, 0.12, 1, False)],
)
def test_throughput_ttft_and_errors_are_targets(ours: float, ttft_s: float, errors: int, met: bool) -> None:
    found = BaselineComparison.of(1, rounds((100, ours, 0.1, ttft_s), errors=errors))
    assert found.meets(min_throughput_ratio=0.9, max_ttft_ratio=1.2001) is met


@pytest.mark.process
def test_both_endpoints_are_measured_with_prompts_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    one, other = Endpoint(), Endpoint()
    with one.served(), other.served():
        main(["--baseline", one.url, "--gateway", other.url, *SMALL])
    (found,) = msgspec.json.decode(capsys.readouterr().out, type=list[BaselineComparison])
    assert found.streams == 2 and found.errors == {BASELINE: 0, GATEWAY: 0}
    assert all(figure.low > 0 for figure in found.tokens_per_s.values())
    prompts = [body["prompt"] for body in (*one.asked, *other.asked) if body["max_tokens"] == 4]
    assert len(prompts) == len(set(prompts)) == 8


@pytest.mark.process
def test_an_endpoint_that_does_not_answer_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    one = Endpoint()
    with one.served():
        assert main(["--baseline", one.url, "--gateway", "http://127.0.0.1:9", *SMALL]) == 1
    assert "the endpoint does not answer" in capsys.readouterr().err


SMALL = ["--streams", "2", "--tokens", "4", "--requests", "1", "--rounds", "2", "--json"]
