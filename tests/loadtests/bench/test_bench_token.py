"""The token benchmark: whose time a process is, ratios within a round, and what is refused."""

from __future__ import annotations

import pytest

from loadtests.bench.parts.token_cost import TokenCostSample, costs
from loadtests.bench.parts.token_servers import ENGINE, FRONT, GATEWAY, OTHER, group
from loadtests.bench.token import main


@pytest.mark.parametrize(
    ("cmdline", "name", "parent", "child", "expected"),
    [
        (["python", "-m", "tidegate"], "python", OTHER, False, OTHER),
        (["python", "-m", "gateway.worker_main"], "python", OTHER, True, GATEWAY),
        (["python", "-m", "serve.engine.main"], "python", OTHER, True, FRONT),
        (["VLLM::EngineCore"], "VLLM::EngineCore", FRONT, True, ENGINE),
        (["VLLM::Worker"], "VLLM::Worker", ENGINE, True, ENGINE),
        (["python", "-m", "vllm"], "python", FRONT, False, FRONT),
        (["vllm-rs", "frontend"], "vllm-rs", FRONT, True, FRONT),
    ],
)
def test_a_process_belongs_to_what_it_does(
    cmdline: list[str], name: str, parent: str, child: bool, expected: str
) -> None:
    assert group(cmdline, name, parent, child) == expected


def test_ratios_are_to_vllm_in_the_same_round() -> None:
    def cell(surround_us: float, tokens_per_s: float) -> TokenCostSample:
        names = set(TokenCostSample.__struct_fields__)
        return TokenCostSample(
            **dict.fromkeys(names, 1.0) | {"surround_us": surround_us, "tokens_per_s": tokens_per_s}
        )

    rounds = [
        {"vllm": cell(100.0, 50.0), "gateway": cell(60.0, 100.0)},
        {"vllm": cell(200.0, 25.0), "gateway": cell(100.0, 100.0)},
    ]
    found = costs(rounds)["gateway"]
    assert (found.surround_ratio.low, found.surround_ratio.high) == (0.5, 0.6)
    assert (found.throughput_ratio.low, found.throughput_ratio.high) == (2.0, 4.0)
    assert costs([{"gateway": cell(60.0, 100.0)}])["gateway"].surround_ratio.median == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "envoy"], "no such rows: envoy; expected some of vllm, replica"),
        (["--streams", "16,999"], "--streams is 16,999; expected numbers from 1 to 256"),
        (["--rows", "vllm-rust"], "nothing to measure"),
    ],
)
def test_what_it_cannot_measure_it_says(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err
