"""The workload file: traces and generators in YAML, mixed into one stream of requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from policy.config.control import Section
from policy.config.convert import convert
from policy.errors import ConfigError
from sim.arrivals import Arrival
from sim.workload.generators.generate import GeneratedWorkload, check_workload, generate
from sim.workload.generators.request_distributions import LengthDistribution
from sim.workload.traces.detect_format import open_trace
from sim.workload.transforms import mix, scale_rate, slice_trace
from store.yaml_file import read_yaml

_Instant = Annotated[float, Meta(ge=0)]
# A month of the slowest traces.
_Duration = Annotated[float, Meta(gt=0, le=31 * 86_400)]
_Factor = Annotated[float, Meta(gt=0, le=1000)]


class TraceSource(Section, frozen=True):
    """The trace at ``path`` from ``from_s`` to before ``to_s`` seconds, of ``only_model`` if given.

    It is replayed ``rate`` times as fast, with scaled token counts.
    """

    path: str
    from_s: _Instant = 0.0
    to_s: _Instant | None = None
    rate: _Factor = 1.0
    input_scale: _Factor = 1.0
    output_scale: _Factor = 1.0
    only_model: str = ""


class WorkloadSource(Section, frozen=True):
    """A trace or a generator; ``model`` and ``tenant`` replace those of its requests."""

    trace: TraceSource | None = None
    generate: GeneratedWorkload | None = None
    model: str = ""
    tenant: str = ""


class WorkloadSpec(Section, frozen=True):
    """The document: sources merged by arrival time, for ``duration_s``."""

    mix: tuple[WorkloadSource, ...]
    duration_s: _Duration | None = None


@dataclass(frozen=True)
class WorkloadFile:
    """A workload; paths are relative to ``folder``."""

    spec: WorkloadSpec
    folder: Path

    @property
    def duration_s(self) -> float | None:
        """Its duration in seconds; ``None``: until the last request of its traces."""
        return self.spec.duration_s

    def arrivals(self, seed: int) -> Iterator[Arrival]:
        """The requests in order, the same for the same ``seed``.

        Raises :class:`policy.errors.TraceError` for a bad trace.
        """
        sources = [self._source(each, f"workload {seed} {i}") for i, each in enumerate(self.spec.mix)]
        return slice_trace(mix(sources), 0.0, self.duration_s)

    def _source(self, source: WorkloadSource, seed: str) -> Iterator[Arrival]:
        if source.generate is not None:
            assert self.duration_s is not None  # parse_workload
            made = generate(source.generate, seed, self.duration_s, self._trace)
        else:
            assert source.trace is not None  # parse_workload
            made = self._cut(source.trace)
        return (_named(each, source.model, source.tenant) for each in made)

    def _cut(self, source: TraceSource) -> Iterator[Arrival]:
        trace = self._trace(source.path)
        if only := source.only_model:
            trace = (each for each in trace if each.model == only)
        return scale_rate(
            slice_trace(trace, source.from_s, source.to_s),
            rate=source.rate,
            input_scale=source.input_scale,
            output_scale=source.output_scale,
        )

    def _trace(self, path: str) -> Iterator[Arrival]:
        return open_trace(self.folder / Path(path).expanduser())


def parse_workload(document: object, folder: Path) -> WorkloadFile:
    """Validate a document; paths are relative to ``folder``.

    Raises :class:`policy.errors.ConfigError` for unknown keys, wrong types, values out of range, and
    contradictions.
    """
    spec = convert(document, WorkloadSpec, "")
    if not spec.mix:
        raise ConfigError("mix", [], "at least one source")
    for i, source in enumerate(spec.mix):
        path = f"mix[{i}]"
        if (source.trace is None) == (source.generate is None):
            raise ConfigError(path, None, "trace or generate, one of them")
        if source.generate is not None:
            if spec.duration_s is None:
                raise ConfigError("duration_s", None, f"a value: {path}.generate has no end of its own")
            check_workload(f"{path}.generate", source.generate)
        trace = source.trace
        if trace is not None and trace.to_s is not None and trace.to_s <= trace.from_s:
            raise ConfigError(f"{path}.trace.to_s", trace.to_s, f"more than from_s = {trace.from_s:g}")
    return WorkloadFile(spec, folder)


def read_workload(path: Path) -> WorkloadFile:
    """The workload in the YAML file at ``path``; paths are relative to its folder.

    Raises :class:`policy.errors.ConfigError` with the file and the key, also for a missing trace.
    """
    raw = read_yaml(path, "mix")
    try:
        workload = parse_workload(raw, path.resolve().parent)
        _check_files(workload)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.path}", error.value, error.expected) from None
    return workload


def arrivals_of(path: Path, seed: int, rate: float = 1.0) -> Iterator[Arrival]:
    """The requests of the trace or workload (``.yaml``, ``.yml``) at ``path``, ``rate`` times as fast.

    ``seed`` is for generators. Raises :class:`policy.errors.ConfigError` and
    :class:`policy.errors.TraceError`.
    """
    workload = path.suffix.lower() in (".yaml", ".yml")
    arrivals = read_workload(path).arrivals(seed) if workload else open_trace(path)
    return arrivals if rate == 1.0 else scale_rate(arrivals, rate=rate)


def _check_files(workload: WorkloadFile) -> None:
    for i, source in enumerate(workload.spec.mix):
        named = {f"mix[{i}].trace.path": source.trace.path} if source.trace is not None else {}
        if source.generate is not None:
            for key in ("input_tokens", "output_tokens"):
                length = getattr(source.generate, key)
                if isinstance(length, LengthDistribution) and length.trace:
                    named[f"mix[{i}].generate.{key}.trace"] = length.trace
        for where, name in named.items():
            found = workload.folder / Path(name).expanduser()
            if not found.is_file():
                raise ConfigError(where, name, f"a file that exists (looked at {found})")


def _named(arrival: Arrival, model: str, tenant: str) -> Arrival:
    if not model and not tenant:
        return arrival
    return arrival._replace(model=model or arrival.model, tenant=tenant or arrival.tenant)
