"""``tidegate explain``: a decision on one screen, with its inputs, what clipped it, and what came of it."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from policy.config.control import GuardConfig, SloConfig
from policy.engine.capacity import Capability
from policy.errors import TargetError
from policy.scaling.situation import Decision, Guardrail, Limit, Situation
from policy.scaling.view import Supply
from policy.signals.types import Signals
from serve.controller_api import LoggedDecision, SwitchOutcome
from tests.tidegate.decisions import DEMAND, OVERRIDE, SIGNALS, decision, rates, situation, unchanged
from tidegate.cli import group
from tidegate.commands.durations import clock
from tidegate.commands.fleet import explain
from tidegate.commands.fleet.explain_view import Aftermath, render_decision

NOW = 1120.0
DONE = Aftermath("multi-replica", 4)


def lines(
    made: Decision,
    seen: Situation | None = None,
    after: Aftermath | None = None,
    came: SwitchOutcome | None = None,
) -> list[str]:
    """What is printed of one decision at 100 columns, each line with its label."""
    out = io.StringIO()
    logged = LoggedDecision(situation=seen or situation(), decision=made, outcome=came)
    Console(file=out, width=100, markup=False, highlight=False).print(render_decision(logged, after, NOW))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def said(
    label: str,
    made: Decision,
    seen: Situation | None = None,
    after: Aftermath | None = None,
    came: SwitchOutcome | None = None,
) -> str:
    """The rows of one label, joined."""
    rows: list[str] = []
    current = ""
    for line in lines(made, seen, after, came)[1:]:
        current = line[:9].strip() or current
        if current == label:
            rows.append(line[9:].strip())
    return " ".join(rows)


def test_a_decision_fits_a_screen_of_100_columns() -> None:
    shown = lines(decision(), after=DONE)
    assert len(shown) <= 24
    assert max(map(len, shown)) <= 100


def test_it_says_what_changed_why_and_that_it_was_done() -> None:
    head, because, outcome, *_ = lines(decision(), after=DONE)
    assert head.endswith("multi-replica x 2 -> multi-replica x 4")
    assert "(2 min 0 s ago)" in head
    assert because.split(maxsplit=1) == ["because", decision().reason]
    assert outcome.split(maxsplit=1) == ["outcome", "carried out"]


@pytest.mark.parametrize(
    ("label", "what"),
    [
        ("demand", "11.8/s arrive over 20 s, 9.20/s over 60 s; 0.25/s refused; 31.0 at once"),
        ("demand", "3 queued, the oldest for 0.8 s; told 0.4 s ago"),
        ("latency", "TTFT p95 1.32 s (promised 1.00 s); ITL p95 41 ms (promised 50 ms)"),
        ("latency", "90.0% within both (promised 99%)"),
        ("requests", "256 tokens in, 31% of them cached, 64 out"),
        ("supply", "2 of 2 serving; 1 starting, ready in 4.0 s; a start takes 6.0 s"),
        ("replicas", "KV 62% to 71%; 26 run, 3 wait; told 0.5 s ago"),
        ("capacity", "takes 3.40/s within the objective, 5.10/s at most; engine model v3 errs 6%"),
        ("policy", "asks for 6: 12.4/s are expected"),
        ("policy", "forecast 5.40, last_20_s 3.83, saturation 2.90, queue 0.30"),
        ("policy", "expects 12.4/s, 16.1/s at most"),
        ("rules", "step 6 -> 4: 2 more at once"),
        ("modes", "single-large 1 9.30 20% - - cannot keep up with 16.1/s"),
        ("others", "the shadow would ask for 5: queue 3 of 2"),
        ("others", "panic_window 6, static 1"),
    ],
)
def test_each_input_and_what_was_made_of_it_is_there(label: str, what: str) -> None:
    assert what in " ".join(said(label, decision()).split())


def test_every_rule_that_changed_the_count_says_from_what_to_what_and_why() -> None:
    clips = (
        Limit(rule=Guardrail.STALENESS, was=1, now=2, why="the figures are 20 s old"),
        Limit(rule=Guardrail.BUDGET, was=9, now=6, why="8 GPUs in all"),
    )
    rules = said("rules", decision(clips=clips))
    assert rules == "staleness 1 -> 2: the figures are 20 s old budget 9 -> 6: 8 GPUs in all"
    assert said("rules", unchanged()) == "none changed that"


@pytest.mark.parametrize(
    ("made", "seen", "after", "outcome"),
    [
        (unchanged(), {}, None, "nothing to do"),
        (decision(), {}, None, "what came of it is not known"),
        (decision(), {}, Aftermath("multi-replica", 4, "starting"), "on its way (starting)"),
        (decision(), {}, Aftermath("multi-replica", 4, "recovering"), "carried out"),
        (
            decision(),
            {},
            Aftermath("multi-replica", 2, "steady"),
            "not carried out; `tidegate status --json` has the events",
        ),
        (
            decision(dry_run=True),
            {},
            Aftermath("multi-replica", 2),
            "not carried out (control.guard.dry_run)",
        ),
        (
            decision(mode="single-large", count=1, gain=0.31),
            {},
            Aftermath("single-large", 1),
            "carried out; the switch promises to cost 31% less",
        ),
        (decision(short=1.25), {}, DONE, "carried out; 1.25/s are left unserved"),
        (decision(short=1.25), {"overflow": True}, DONE, "carried out; 1.25/s are left to upstreams"),
    ],
)
def test_the_outcome(made: Decision, seen: dict[str, Any], after: Aftermath | None, outcome: str) -> None:
    assert said("outcome", made, situation(**seen), after) == outcome


@pytest.mark.parametrize(("measured", "what"), [(0.28, "28% less"), (-0.1, "10% more")])
def test_what_came_of_a_switch_is_beside_what_it_promised(measured: float, what: str) -> None:
    came = SwitchOutcome(
        at=1100.0, model="sim", was="multi-replica", mode="single-large", promised=0.31, measured=measured,
        met_before=0.9, met=0.99,
    )  # fmt: skip
    made = decision(mode="single-large", count=1, gain=0.31)
    assert said("outcome", made, after=Aftermath("single-large", 1), came=came) == (
        "carried out; the switch promises to cost 31% less, and was measured to cost"
        f" {what}: 90.0% within the objective before, 99.0% since"
    )


def test_modes_that_failed_are_said_to_be_barred() -> None:
    after = Aftermath("multi-replica", 4, "steady", {"single-large": NOW + 60})
    barred = f"single-large failed and is not tried before {clock(NOW + 60, NOW)}"
    assert said("barred", decision(), after=after) == barred
    assert said("barred", decision(), after=DONE) == ""


def test_what_was_set_by_hand_says_until_when() -> None:
    by_hand = said("outcome", unchanged(), situation(override=OVERRIDE))
    assert by_hand.startswith("nothing to do; by hand: multi-replica x 3 until ")
    for_ever = msgspec.structs.replace(OVERRIDE, until=None, count=None)
    assert said("outcome", unchanged(), situation(override=for_ever)).endswith("until taken back")


def test_figures_that_are_missing_are_said_to_be() -> None:
    blind = situation(signals=Signals(), slo=SloConfig())
    assert said("demand", decision(), blind) == "no gateway has told anything yet"
    assert not said("latency", decision(), blind)
    assert not said("replicas", decision(), blind)
    quiet = msgspec.structs.replace(
        DEMAND, arrivals=rates(0.0, 0.0), ttft=None, itl=None, output_tokens=0.0, input_tokens=0.0, idle_s=70
    )
    seen = situation(signals=Signals(demand=quiet), slo=SloConfig())
    assert said("latency", decision(), seen) == "TTFT p95 not measured; ITL p95 not measured"
    assert said("requests", decision(), seen) == "none has ended in ten minutes"
    assert "nobody has asked for 1 min 10 s" in said("demand", decision(), seen)


def test_what_a_reader_should_look_at_twice_is_told() -> None:
    slow = msgspec.structs.replace(
        SIGNALS.replicas[0], slowness=1.5, throttled="hw_thermal", watts=300.0, celsius=88
    )
    seen = situation(
        signals=Signals(demand=DEMAND, replicas=(slow,)), supply=Supply(wanted=2, serving=1, failures=4)
    )
    assert "4 starts failed in a row" in said("supply", decision(), seen)
    replicas = said("replicas", decision(), seen)
    assert "sim-small-1 takes 1.50 times as long as its model says (hw_thermal)" in replicas
    assert "300 W together, the hottest card has 88 C" in replicas


@pytest.mark.parametrize(
    ("capability", "slo", "what"),
    [
        (Capability(mu=0.0, mu_max=5.0), SloConfig(itl_p95_s=0.05), "cannot meet the objective; 5.00/s"),
        (Capability(mu=4.0, mu_max=5.0), SloConfig(), "one replica of multi-replica takes 4.00/s;"),
        (Capability(mu=4.0, mu_max=5.0), SloConfig(), "engine model as shipped"),
    ],
)
def test_what_a_replica_can_do(capability: Capability, slo: SloConfig, what: str) -> None:
    assert what in said("capacity", decision(capability=capability), situation(slo=slo))


def test_old_figures_are_red() -> None:
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True, color_system="standard")
    console.print(
        render_decision(
            LoggedDecision(situation=situation(guard=GuardConfig(stale_s=0.45)), decision=decision()),
            None,
            NOW,
        )
    )
    shown = out.getvalue()
    assert "\x1b[31mtold 0.5 s ago" in shown
    assert "\x1b[31mtold 0.4 s ago" not in shown


class Controller:
    """Answers as the controller does: the newest first, up to an instant."""

    def __init__(self, *decisions: Decision) -> None:
        self._log = [LoggedDecision(situation=situation(at=each.at), decision=each) for each in decisions]

    def status(self) -> SimpleNamespace:
        aims = {logged.decision.model: logged.decision for logged in self._log}
        return SimpleNamespace(
            models=[
                SimpleNamespace(name=name, mode=aim.mode, target=aim.count, phase="starting", barred={})
                for name, aim in aims.items()
            ]
        )

    def decisions(
        self, model: str | None = None, last: int = 1, at: float | None = None
    ) -> tuple[LoggedDecision, ...]:
        if model not in {logged.decision.model for logged in self._log}:
            raise TargetError(f"no model is called {model!r}")
        found = [
            each
            for each in reversed(self._log)
            if each.decision.model == model and (at is None or each.decision.at <= at)
        ]
        return tuple(found[:last])


Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    def invoke(decisions: Sequence[Decision], *words: str) -> Result:
        monkeypatch.setattr(explain, "controller_client", lambda state: Controller(*decisions))
        return CliRunner().invoke(group, ["--state-dir", str(tmp_path), "explain", *words])

    return invoke


def told(done: Result) -> list[float]:
    """When the decisions that are shown were made."""
    assert done.exit_code == 0, done.output
    return [each["decision"]["at"] for each in json.loads(done.stdout)["decisions"]]


LOG = (
    unchanged(at=990.0),
    decision(at=1000.0),
    *(unchanged(at=1000.0 + 60 * i) for i in range(1, 4)),
    decision(at=1240.0, count=5, was_count=4),
    *(decision(at=1240.0 + 60 * i, count=5, was_count=5) for i in range(1, 4)),
)


def test_without_an_option_the_last_change_and_the_present(run: Run) -> None:
    assert told(run(LOG, "sim", "--json")) == [1240.0, 1420.0]
    shown = run(LOG, "sim").output
    assert shown.count("multi-replica x 4 -> multi-replica x 5") == 1
    assert shown.count("multi-replica x 5, as before") == 1
    assert "carried out" in shown
    # Where the present one is the change, it is told once; where nothing changed, the present one.
    assert told(run(LOG[:2], "--json")) == [1000.0]
    # What is aimed for now says what came of it.
    assert "on its way (starting)" in run(LOG[:2]).output
    assert told(run(LOG[:1], "--json")) == [990.0]


def test_at_tells_what_was_in_force_then_and_what_had_changed_last(run: Run) -> None:
    ago = explain.time.time() - 1190.0
    assert told(run(LOG, "--at", f"{int(ago)}s ago", "--json")) == [1000.0, 1180.0]


def test_what_came_of_a_change_is_seen_from_its_own_instant(run: Run) -> None:
    shown = run(LOG, "--at", "1970-01-01T00:16:40+00:00").output
    assert "multi-replica x 2 -> multi-replica x 4" in shown
    assert "outcome    carried out" in shown


def test_last_tells_so_many_oldest_first(run: Run) -> None:
    assert told(run(LOG, "--last", "3", "--json")) == [1300.0, 1360.0, 1420.0]
    assert told(run(LOG, "--last", "50", "--json")) == [each.at for each in LOG]


def test_without_a_model_each_is_told(run: Run) -> None:
    other = unchanged(at=1400.0, model="other")
    assert told(run((*LOG, other), "--json")) == [1240.0, 1420.0, 1400.0]


def test_the_json_is_what_the_controller_logged(run: Run) -> None:
    done = run(LOG, "sim", "--json")
    shown = msgspec.json.decode(done.stdout, type=dict[str, list[LoggedDecision]])["decisions"]
    assert shown[-1] == LoggedDecision(situation=situation(at=LOG[-1].at), decision=LOG[-1])


def test_plain_where_nobody_looks(run: Run) -> None:
    assert "\x1b" not in run(LOG, "sim").output


def test_what_cannot_be_told(run: Run) -> None:
    assert run(LOG, "--last", "1", "--at", "12:03").exit_code == 2
    assert run(LOG, "--last", "0").exit_code == 2
    assert "is no time" in run(LOG, "--at", "noon").output
    assert isinstance(run(LOG, "nobody").exception, TargetError)
    before = run(LOG, "sim", "--at", "1970-01-01T00:10:00+00:00")
    assert before.exit_code == 1
    assert "no decision on sim from before 1970-01-01" in before.output
