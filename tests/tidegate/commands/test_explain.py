"""``tidegate explain``: the verdict, one decision on one screen, and the decisions that are selected."""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from policy.config.control import GuardConfig, SloConfig
from policy.config.deployment import ResourceBudget
from policy.engine.replica_capacity import Capability
from policy.errors import TargetError, Unreachable
from policy.scaling.decision_types import AppliedGuardrail, Decision, Guardrail, Situation
from policy.scaling.view import Proposal, Supply
from policy.signals.types import PriorityShares, Shares, Signals
from policy.types import Priority
from serve.autoscaler.decision_journal import DecisionJournal, DecisionRound
from serve.controller_api_schema import LoggedDecision, SwitchOutcome
from store.state_dir import StateDir
from tests.tidegate.decisions import (
    DEMAND,
    OVERRIDE,
    SIGNALS,
    decision,
    quantiles,
    rates,
    situation,
    unchanged,
)
from tidegate.cli import group
from tidegate.commands.fleet import explain
from tidegate.commands.fleet.explain_view import DecisionRollout, render_decision, verdict
from tidegate.commands.units import clock

NOW = 1120.0
DONE = DecisionRollout("multi-replica", 4)


def lines(
    made: Decision,
    seen: Situation | None = None,
    after: DecisionRollout | None = None,
    review: SwitchOutcome | None = None,
) -> list[str]:
    out = io.StringIO()
    logged = LoggedDecision(situation=seen or situation(), decision=made, outcome=review)
    Console(file=out, width=100, markup=False, highlight=False).print(render_decision(logged, after, NOW))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def section(label: str, made: Decision, *rest: Any) -> str:
    rows: list[str] = []
    current = ""
    for line in lines(made, *rest)[1:]:
        current = line[:9].strip() or current
        if current == label:
            rows.append(line[9:].strip())
    return " ".join(" ".join(rows).split())


def with_demand(**over: Any) -> Situation:
    return situation(signals=Signals(demand=msgspec.structs.replace(DEMAND, **over)))


FAST = {"ttft": quantiles(0.32), "itl": quantiles(0.041), "met": Shares(ttft=1.0, itl=1.0, both=0.995)}
QUIET = {"arrivals": rates(0.0, 0.0), "concurrency": rates(0.0, 0.0), "queued": 0}


def wants(count: int, now: int, rule: Guardrail | None = None, **over: Any) -> Decision:
    limits = () if rule is None else (AppliedGuardrail(rule=rule, was=count, now=now, why=""),)
    fields = {
        "proposal": Proposal(count=count, reason=""),
        "count": now,
        "was_count": now,
        "applied_guardrails": limits,
    }
    return decision(**fields | over)


@pytest.mark.parametrize(
    ("seen", "made", "line"),
    [
        (
            with_demand(ttft=None, itl=quantiles(0.111)), wants(7, 6, Guardrail.BUDGET),
            "SLO missed: ITL p95 111 ms > 50 ms; wants 7 replicas, capped at 6 (budget)",
        ),
        (
            with_demand(), wants(6, 6, proposal=Proposal(count=6, reason="", unbounded=7)),
            "TTFT p95 1.32 s > 1.00 s; wants 7 replicas, capped at 6 (budget)",
        ),
        (with_demand(**FAST), wants(2, 2, was_count=0), "wakes from zero: scales to 2 replicas"),
        (
            with_demand(ttft=quantiles(1.0001), itl=quantiles(0.0502)), wants(6, 4, Guardrail.STEP),
            "TTFT p95 1.000 s > 1.00 s, ITL p95 50.2 ms > 50 ms; wants 6 replicas, limited to 4 (step)",
        ),
        (
            with_demand(**FAST), wants(4, 4),
            "SLO met: TTFT p95 320 ms <= 1.00 s, ITL p95 41 ms <= 50 ms; keeps 4 replicas",
        ),
        (
            with_demand(**FAST | {"met": Shares(both=0.97)}), wants(4, 4, was_count=2, dry_run=True),
            "SLO missed: 97.0% of requests within the latency targets < 99.0%; scales from 2 to 4 replicas"
            " (dry run: not applied)",
        ),
        (
            with_demand(**FAST), decision(mode="single-large", count=1, short=1.8),
            "<= 50 ms; switches from multi-replica x 2 to single-large x 1; 1.80/s exceed the capacity",
        ),
        (
            with_demand(**QUIET, idle_s=303.0), wants(1, 0, Guardrail.MIN_HEALTHY),
            "Idle: no requests in 5 min 3 s; wants 1 replica, kept at 0 (min_healthy)",
        ),
        (
            situation(override=OVERRIDE), wants(4, 4),
            f"Manual override: multi-replica x 3 until {clock(2800.0, NOW)}; keeps 4 replicas",
        ),
        (situation(signals=Signals()), unchanged(), "No metrics: no gateway has reported yet"),
        (situation(slo=SloConfig()), unchanged(), "No SLO set: 11.8/s requests"),
        (with_demand(ttft=None, itl=None), unchanged(), "SLO not measured yet"),
    ],
)  # fmt: skip
def test_the_verdict_names_slo_change_and_limit(seen: Situation, made: Decision, line: str) -> None:
    text = verdict(LoggedDecision(situation=seen, decision=made), NOW).plain
    assert text.startswith("sim  ")
    assert line in text


def test_a_decision_fits_a_screen_of_100_columns() -> None:
    shown = lines(decision(), None, DONE)
    assert len(shown) <= 24
    assert max(map(len, shown)) <= 100
    head, because, outcome, *_ = shown
    assert head.endswith("(2 min 0 s ago)  multi-replica x 2 -> multi-replica x 4")
    assert because.split(maxsplit=1) == ["because", decision().reason]
    assert outcome.split(maxsplit=1) == ["outcome", "applied"]


BLIND = situation(signals=Signals(), slo=SloConfig())
UNMEASURED = situation(
    signals=Signals(
        demand=msgspec.structs.replace(
            DEMAND, **QUIET, ttft=None, itl=None, output_tokens=0.0, input_tokens=0.0, idle_s=70
        )
    ),
    slo=SloConfig(),
)
ODD = situation(
    signals=Signals(
        demand=DEMAND,
        replicas=(
            msgspec.structs.replace(
                SIGNALS.replicas[0], slowness=1.5, throttled="hw_thermal", watts=300.0, celsius=88
            ),
        ),
    ),
    supply=Supply(wanted=2, serving=1, failures=4),
)
LIMITS = (
    AppliedGuardrail(rule=Guardrail.STALENESS, was=1, now=2, why="the metrics are 20 s old"),
    AppliedGuardrail(rule=Guardrail.BUDGET, was=9, now=6, why="8 GPUs in all"),
)


TIGHT = situation(slo=SloConfig(ttft_p95_s=0.001))


@pytest.mark.parametrize(
    ("label", "made", "seen", "what"),
    [
        (
            "demand", {}, None,
            "11.8/s arrivals over 20 s, 9.20/s over 60 s; 0.25/s rejected; 31.0 concurrent requests",
        ),
        ("demand", {}, None, "3 queued, oldest 0.8 s; updated 0.4 s ago"),
        ("demand", {}, BLIND, "no gateway has reported yet"),
        ("demand", {}, UNMEASURED, "no requests in 1 min 10 s"),
        ("latency", {}, None, "TTFT p95 1.32 s (SLO 1.00 s); ITL p95 41 ms (SLO 50 ms)"),
        ("latency", {}, None, "90.0% of requests within the SLO (target 99%)"),
        ("latency", {}, UNMEASURED, "TTFT p95 not measured; ITL p95 not measured"),
        ("requests", {}, None, "mean 256 input tokens (31% cached), 64 output tokens"),
        ("requests", {}, UNMEASURED, "none in the last 10 min"),
        ("supply", {}, None, "2 of 2 desired replicas ready; 1 starting, ready in 4.0 s; start-up time"),
        ("supply", {}, ODD, "4 starts failed in a row"),
        ("replicas", {}, None, "KV cache 62% to 71% used; 26 running, 3 waiting; updated 0.5 s ago"),
        ("replicas", {}, ODD, "sim-small-1: steps take 1.50x the predicted time (hw_thermal)"),
        ("replicas", {}, ODD, "power 300 W, hottest GPU 88 °C"),
        ("capacity", {}, None, "3.40/s per replica of multi-replica within the SLO, max 5.10/s; performance"),
        ("capacity", {}, None, "performance model v3, error 6%"),
        ("capacity", {"capability": Capability(mu=0.0, mu_max=5.0)}, None, "cannot meet the SLO, max 5.00/s"),
        ("capacity", {"capability": Capability(mu=4.0, mu_max=5.0)}, BLIND, "4.00/s per replica of"),
        ("capacity", {"capability": Capability(mu=4.0, mu_max=5.0)}, None, "model not calibrated"),
        ("SLO", {}, TIGHT, "(256 prompt and 64 output tokens) misses it on an idle replica: TTFT "),
        ("policy", {}, None, "desired replicas 6: 12.4/s are expected"),
        ("policy", {}, None, "terms, in replicas: forecast 5.40, last_20_s 3.83, saturation 2.90, queue"),
        ("policy", {}, None, "forecast 12.4/s, upper bound 16.1/s"),
        ("limits", {}, None, "step 6 -> 4: 2 more at once"),
        ("limits", {"applied_guardrails": ()}, None, "none applied"),
        (
            "limits", {"applied_guardrails": LIMITS}, None,
            "staleness 1 -> 2: the metrics are 20 s old budget 9 -> 6: 8 GPUs in all",
        ),
        ("modes", {}, None, "single-large 1 9.30 20% - - cannot keep up with 16.1/s"),
        ("others", {}, None, "shadow policy: desired replicas 5: queue 3 of 2"),
        ("others", {}, None, "desired replicas: panic_window 6, static 1"),
    ],
)  # fmt: skip
def test_each_input_has_its_unit(label: str, made: dict[str, Any], seen: Situation | None, what: str) -> None:
    assert what in section(label, decision(**made), seen)


def test_sections_without_metrics_are_left_out() -> None:
    assert not section("latency", decision(), BLIND)
    assert not section("replicas", decision(), BLIND)


SWITCH = decision(mode="single-large", count=1, gain=0.31)
SWITCHED = DecisionRollout("single-large", 1)


def review(measured: float) -> SwitchOutcome:
    return SwitchOutcome(
        at=1100.0, model="sim", was="multi-replica", mode="single-large", promised=0.31, measured=measured,
        met_before=0.9, met=0.99,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("made", "seen", "after", "came", "outcome"),
    [
        (unchanged(), {}, None, None, "no change"),
        (decision(), {}, None, None, "unknown"),
        (decision(), {}, DecisionRollout("multi-replica", 4, "starting"), None, "in progress (starting)"),
        (decision(), {}, DecisionRollout("multi-replica", 4, "recovering"), None, "applied"),
        (
            decision(), {}, DecisionRollout("multi-replica", 2, "steady"), None,
            "not applied; see the events in `tidegate status --json`",
        ),
        (
            decision(dry_run=True), {}, DecisionRollout("multi-replica", 2), None,
            "not applied (control.guard.dry_run)",
        ),
        (SWITCH, {}, SWITCHED, None, "applied; predicted gain of the switch: 31%"),
        (
            SWITCH, {}, SWITCHED, review(-0.1),
            "applied; predicted gain of the switch: 31%, measured: costs 10% more; 90.0% of requests"
            " within the SLO before, 99.0% since",
        ),
        (decision(short=1.25), {}, DONE, None, "applied; 1.25/s exceed the capacity"),
        (decision(short=1.25), {"spillover": True}, DONE, None, "applied; 1.25/s go to fallback providers"),
        (
            unchanged(), {"override": OVERRIDE}, None, None,
            f"no change; manual override: multi-replica x 3 until {clock(2800.0, NOW)}",
        ),
        (
            unchanged(), {"override": msgspec.structs.replace(OVERRIDE, until=None, count=None)}, None, None,
            "no change; manual override: multi-replica",
        ),
    ],
)  # fmt: skip
def test_the_outcome_says_whether_the_decision_was_applied(
    made: Decision,
    seen: dict[str, Any],
    after: DecisionRollout | None,
    came: SwitchOutcome | None,
    outcome: str,
) -> None:
    assert section("outcome", made, situation(**seen), after, came) == outcome


def test_modes_that_failed_are_blocked_until_a_time() -> None:
    after = DecisionRollout("multi-replica", 4, "steady", {"single-large": NOW + 60})
    blocked = f"single-large failed; no switch to it before {clock(NOW + 60, NOW)}"
    assert section("blocked", decision(), None, after) == blocked
    assert not section("blocked", decision(), None, DONE)


def test_stale_metrics_are_red() -> None:
    out = io.StringIO()
    logged = LoggedDecision(situation=situation(guard=GuardConfig(stale_s=0.45)), decision=decision())
    Console(file=out, width=100, force_terminal=True, color_system="standard").print(
        render_decision(logged, None, NOW)
    )
    assert "\x1b[31mupdated 0.5 s ago" in out.getvalue()
    assert "\x1b[31mupdated 0.4 s ago" not in out.getvalue()


LOG = (
    unchanged(at=990.0),
    decision(at=1000.0),
    *(unchanged(at=1000.0 + 60 * i) for i in range(1, 4)),
    decision(at=1240.0, count=5, was_count=4),
    *(decision(at=1240.0 + 60 * i, count=5, was_count=5) for i in range(1, 4)),
)
Run = Callable[..., Result]


def stop(folder: Path, decisions: Sequence[Decision]) -> None:
    """The state directory of a stopped deployment that made ``decisions``."""
    state = StateDir(folder).ensure()
    models = [
        {
            "name": name, "engine": "sim", "shapes": {"small": {"cpus": 1}},
            "modes": {"multi-replica": {"shape": "small"}},
        }
        for name in ("sim", "other")
    ]  # fmt: skip
    state.save(state.deployment_path, {"models": models, "cluster": {"controller": "127.0.0.1:1"}})
    journal = DecisionJournal(state.decisions_path)
    for each in decisions:
        situations = {each.model: situation(at=each.at)}
        journal.put(
            DecisionRound(
                at=each.at,
                policies={},
                situations=situations,
                budget=ResourceBudget(),
                decisions={each.model: each},
            )
        )
    journal.flush()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def invoke(decisions: Sequence[Decision], *words: str) -> Result:
        stop(tmp_path, decisions)
        return CliRunner().invoke(group, ["--state-dir", str(tmp_path), "explain", *words])

    return invoke


def times(result: Result) -> list[float]:
    return [each["decision"]["at"] for each in json.loads(result.stdout)["decisions"]]


def test_without_a_controller_decisions_come_from_the_log(run: Run, tmp_path: Path) -> None:
    result = run(LOG, "sim")
    assert result.exit_code == 0, result.output
    log = StateDir(tmp_path).decisions_path
    assert result.stderr == f"Nothing is running on {tmp_path}. Decisions are read from {log}.\n"
    first, _, change, *rest = result.stdout.splitlines()
    assert (
        first.rstrip() == "sim  SLO missed: TTFT p95 1.32 s > 1.00 s; wants 6 replicas, limited to 5 (step)"
    )
    assert change.rstrip().endswith("multi-replica x 4 -> multi-replica x 5")
    shown = "\n".join(rest)
    assert "outcome    applied" in shown
    assert "multi-replica x 5, unchanged" in shown
    assert "\x1b" not in shown


def test_explain_fails_without_a_controller_and_a_log(run: Run, tmp_path: Path) -> None:
    assert isinstance(run((), "sim").exception, Unreachable)
    assert isinstance(run(LOG, "nobody").exception, TargetError)


@pytest.mark.parametrize(
    ("log", "words", "expected"),
    [
        (LOG, "sim", [1240.0, 1420.0]),
        (LOG[:1], "sim", [990.0]),
        (LOG[:2], "sim", [1000.0]),
        (LOG, "sim --last 3", [1300.0, 1360.0, 1420.0]),
        (LOG, "sim --last 50", [each.at for each in LOG]),
        ((*LOG, unchanged(at=1400.0, model="other")), "", [1240.0, 1420.0, 1400.0]),
    ],
)
def test_the_last_change_or_the_requested_decisions_are_shown(
    run: Run, log: Sequence[Decision], words: str, expected: list[float]
) -> None:
    assert times(run(log, *words.split(), "--json")) == expected


def test_at_shows_the_decision_in_force_and_the_change_before(run: Run) -> None:
    ago = int(time.time() - 1190.0)
    assert times(run(LOG, "sim", "--at", f"{ago}s ago", "--json")) == [1000.0, 1180.0]
    shown = run(LOG, "sim", "--at", "1970-01-01T00:16:40+00:00").output
    assert "multi-replica x 2 -> multi-replica x 4" in shown
    assert "outcome    applied" in shown


def test_the_json_is_what_was_logged(run: Run) -> None:
    shown = msgspec.json.decode(run(LOG, "sim", "--json").stdout, type=dict[str, list[LoggedDecision]])
    assert shown["decisions"][-1] == LoggedDecision(situation=situation(at=LOG[-1].at), decision=LOG[-1])


def test_with_a_controller_its_goal_shows_the_outcome(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    goal = SimpleNamespace(name="sim", mode="multi-replica", target=4, phase="starting", barred={})
    newest = LoggedDecision(situation=situation(), decision=LOG[1])
    controller = SimpleNamespace(
        status=lambda: SimpleNamespace(models=[goal], epoch=time.time() - 1.0),
        decisions=lambda model, last, at: (newest,),
    )
    monkeypatch.setattr(explain, "controller_client", lambda state: controller)
    result = run(())
    assert "in progress (starting)" in result.stdout
    assert not result.stderr
    controller.decisions = lambda model, last, at: ()
    result = run((), "sim")
    assert result.exit_code == 1
    assert re.fullmatch(r"tidegate: first decision on sim in [1-4] s\n", result.stderr)
    controller.status = lambda: SimpleNamespace(models=[goal], epoch=time.time() - 3600.0)
    assert run((), "sim").stderr == "tidegate: no decision on sim is known\n"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("--last 1 --at 12:03", 2, "use it without --at"),
        ("--last 0", 2, "--last"),
        ("--at noon", 2, "invalid time 'noon'"),
        ("sim --at 1970-01-01T00:10:00+00:00", 1, "no decision on sim before 1970-01-01"),
    ],
)
def test_invalid_options_and_instants_are_refused(run: Run, words: str, code: int, message: str) -> None:
    result = run(LOG, *words.split())
    assert result.exit_code == code
    assert message in result.output


def test_each_priority_with_an_slo_of_its_own_has_a_line() -> None:
    slos = {Priority.CRITICAL: SloConfig(ttft_p95_s=0.5), Priority.BATCH: SloConfig()}
    met = {Priority.CRITICAL: Shares(ttft=0.9, both=0.9), Priority.BATCH: Shares()}
    shares = {each: PriorityShares(judged=40, met=found) for each, found in met.items()}
    there = msgspec.structs.replace(with_demand(by_priority=shares), slo_by_priority=slos)
    assert str(verdict(LoggedDecision(situation=there, decision=wants(4, 4)), NOW)).startswith(
        "sim  SLO of critical missed: TTFT within 500 ms for 90% < 95%; keeps 4 replicas"
    )
    shown = section("latency", wants(4, 4), there)
    assert "critical: 90.0% of 40 streams within its SLO (TTFT 500 ms)" in shown
    assert "batch: 100.0% of 40 streams within its SLO (no target)" in shown
