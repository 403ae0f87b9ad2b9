"""The benchmark of modes: a deployment that switches modes by load, compared with each mode alone.

A mode alone has its maximum replica count for the whole run, so no run in that mode serves more, and any
gain over it comes from switching.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import msgspec
import numpy as np

from policy.config.deployment import Deployment, Mode
from policy.errors import ConfigError
from policy.scaling.policies.registry import choose, make
from policy.scaling.view import Policy
from sim.arrivals import Arrival
from sim.charts import figure_style as charts
from sim.results.chart_series import ModeInterval, chart_data
from sim.results.run_summary import PolicyEntry, RunSummary, summarise
from sim.simulator.run_record import HOUR_S, Floats, RunRecord

# The name of the deployment that switches by load; the others have the name of their mode.
BY_LOAD = "by_load"
# The window of one point of a curve.
WINDOW_S = 60.0

# Runs one deployment with a seed; the callback gets the simulated seconds as they pass.
Play = Callable[[PolicyEntry, Iterable[Arrival], int, Callable[[float], None]], RunRecord]


class ModeResult(msgspec.Struct, frozen=True, kw_only=True):
    """One deployment, the mean over all seeds; quantiles as in :class:`sim.results.run_summary.RunSummary`.

    ``switches`` is the maximum over the seeds.
    """

    goodput_rps: float
    attainment: float
    gpu_hours: float
    switches: int
    switches_per_h: float
    ttft_p95_s: float | None
    itl_p95_s: float | None
    failed: float


@dataclass(frozen=True, slots=True)
class ModeTrial:
    """One deployment with one seed, which lasted until ``ends_at``.

    ``curve`` is the goodput in requests per second by window of :data:`WINDOW_S`, ``stays`` the modes over
    time.
    """

    summary: RunSummary
    ends_at: float
    curve: Floats
    stays: tuple[ModeInterval, ...]


@dataclass(frozen=True, slots=True)
class ModeBenchmark:
    """All trials by deployment, :data:`BY_LOAD` first, in the order of ``seeds``."""

    seeds: tuple[int, ...]
    trials: Mapping[str, tuple[ModeTrial, ...]]

    @property
    def gains(self) -> tuple[float, ...]:
        """By seed: the goodput by load over that of the best single mode, minus 1."""
        ours, *others = ([trial.summary.goodput_rps for trial in row] for row in self.trials.values())
        best = [max(each) for each in zip(*others, strict=True)]
        return tuple(mine / most - 1 if most else 0.0 for mine, most in zip(ours, best, strict=True))

    def figures(self) -> dict[str, ModeResult]:
        return {name: _figures(trials) for name, trials in self.trials.items()}

    def plain(self) -> dict[str, Any]:
        return {
            "seeds": list(self.seeds),
            "gains": list(self.gains),
            "runs": {name: msgspec.to_builtins(each) for name, each in self.figures().items()},
        }


def fixed_mode(deployment: Deployment) -> list[PolicyEntry]:
    """One entry for each mode of the deployment's only model, which stays in it.

    Raises :class:`policy.errors.ConfigError` for several models or a single mode.
    """
    if len(deployment.models) != 1:
        raise ConfigError("models", len(deployment.models), "one model, whose modes are compared")
    (spec,) = deployment.models
    if len(spec.modes) < 2:
        raise ConfigError(f"models[{spec.name}].modes", ", ".join(spec.modes), "two modes at least")
    control = msgspec.structs.replace(spec.control, policy="static")
    policies: dict[str, Policy] = {spec.name: make(choose("", "static"))}
    entries = []
    for name, mode in spec.modes.items():
        only = {name: Mode(shape=mode.shape, replicas=mode.bounds.max)}
        fixed = msgspec.structs.replace(spec, modes=only, mode=None, control=control)
        alone = msgspec.structs.replace(deployment, models=(fixed,))
        entries.append(PolicyEntry(name, alone, policies))
    return entries


def compare(
    ours: PolicyEntry,
    arrivals: Callable[[int], Iterable[Arrival]],
    play: Play,
    seeds: Sequence[int],
    progress: Callable[[str, float], None] = lambda name, at: None,
) -> ModeBenchmark:
    """Run the ``arrivals`` of each seed on ``ours``, whose mode follows the load, and on each mode alone.

    ``progress`` gets the simulated seconds of each over all seeds. Raises :class:`policy.errors.ConfigError`
    as :func:`fixed_mode` does.
    """
    trials: dict[str, list[ModeTrial]] = {}
    for contender in (ours._replace(name=BY_LOAD), *fixed_mode(ours.deployment)):
        row = trials[contender.name] = []
        for seed in seeds:
            past = sum(trial.ends_at for trial in row)

            def report(at: float, name: str = contender.name, past: float = past) -> None:
                progress(name, past + at)

            row.append(_trial(play(contender, arrivals(seed), seed, report)))
    return ModeBenchmark(tuple(seeds), {name: tuple(row) for name, row in trials.items()})


def _trial(record: RunRecord) -> ModeTrial:
    (picture,) = chart_data(record)
    (requests,) = record.requests.values()
    count = int(record.ends_at // WINDOW_S) + 1
    met = np.bincount((requests.at[requests.met] // WINDOW_S).astype(np.int64), minlength=count)
    return ModeTrial(summarise(record), record.ends_at, met / WINDOW_S, picture.stays)


def _figures(trials: Sequence[ModeTrial]) -> ModeResult:
    summaries = [trial.summary for trial in trials]
    hours = sum(trial.ends_at for trial in trials) / HOUR_S

    def mean(name: str) -> Any:
        known = [value for each in summaries if (value := getattr(each, name)) is not None]
        return fmean(known) if known else None

    averaged = ("goodput_rps", "attainment", "gpu_hours", "ttft_p95_s", "itl_p95_s", "failed")
    return ModeResult(
        **{name: mean(name) for name in averaged},
        switches=max(each.switches for each in summaries),
        switches_per_h=sum(each.switches for each in summaries) / hours if hours else 0.0,
    )


WIDTH, HEIGHT = 760, 330


@charts.styled
def curves(title: str, trials: Mapping[str, ModeTrial]) -> str:
    """The SVG: goodput over time in one trial of each deployment; the first, by load, is on top."""
    first = next(iter(trials.values()))
    figure = charts.new_figure(WIDTH, HEIGHT, title)
    axes = charts.add_axes(figure, 48, 76, WIDTH - 60, HEIGHT - 102)
    charts.time_axis(axes, max(trial.ends_at for trial in trials.values()))
    charts.value_axis(axes, max(float(trial.curve.max()) for trial in trials.values()))
    charts.tint(axes, first.stays, list(dict.fromkeys(stay.mode for stay in first.stays)), charts.TINTS)
    for stay in first.stays:
        charts.name_mode(axes, stay)
    for row, (name, trial) in enumerate(trials.items()):
        at = (np.arange(len(trial.curve)) + 0.5) * WINDOW_S
        width, colour = (1.2 if row else 2.0), charts.COLOURS[row % len(charts.COLOURS)]
        axes.plot(
            at, trial.curve, label=name.replace("_", " "), color=colour, linewidth=width, zorder=3 - row / 10
        )
    place = (48 / WIDTH, 1 - 24 / HEIGHT)
    figure.legend(loc="upper left", bbox_to_anchor=place, ncols=len(trials), frameon=False, borderaxespad=0.0)
    return charts.to_svg(figure)
