"""Metrics of engines, re-exported with the label `replica`: the families of all replicas are joined.

Text is passed on line by line; only lines that are whole and valid are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from policy.wire.metric_definitions import ENGINE_PREFIX

_NAME = ENGINE_PREFIX.encode() + rb"[a-zA-Z0-9_:]+"
_LABELS = rb'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\.)*"'
_VALUE = rb"[+-]?(?:[0-9.]+(?:e[+-]?[0-9]+)?|Inf|NaN)"
_HELP = re.compile(rb"# HELP (" + _NAME + rb") (.*)")
_TYPE = re.compile(rb"# TYPE (" + _NAME + rb") (counter|gauge|histogram|summary|untyped)")
_SAMPLE = re.compile(rb"(" + _NAME + rb")(?:\{((?:" + _LABELS + rb",?)*)\})? (" + _VALUE + rb")")


class _Family:
    def __init__(self, kind: bytes, text: bytes) -> None:
        self.kind = kind
        self.text = text
        self.lines: list[bytes] = []


class EngineMetrics:
    """The joined families, by their names in Prometheus' text format."""

    def __init__(self) -> None:
        self._families: dict[bytes, _Family] = {}

    def add(self, replica: str, text: bytes) -> None:
        """Add the metrics of a replica; instants of creation are left out, as they are no metrics."""
        label = b'replica="%b"' % replica.encode()
        texts: dict[bytes, bytes] = {}
        name, family = b"", None
        for line in text.split(b"\n"):
            if (found := _HELP.fullmatch(line)) is not None:
                texts[found[1]] = found[2]
            elif (found := _TYPE.fullmatch(line)) is not None:
                name, family = found[1], None
                if not name.endswith(b"_created"):
                    family = self._families.setdefault(name, _Family(found[2], texts.get(name, b"")))
                    family = family if family.kind == found[2] else None
            elif family is not None and (found := _SAMPLE.fullmatch(line)) and found[1].startswith(name):
                labels = label + b"," + found[2] if found[2] else label
                family.lines.append(b"%b{%b} %b\n" % (found[1], labels.rstrip(b","), found[3]))

    def text(self, *, openmetrics: bool) -> bytes:
        """All families in Prometheus' text format, or in that of OpenMetrics without its end."""
        return b"".join(self._lines(openmetrics))

    def _lines(self, openmetrics: bool) -> Iterable[bytes]:
        for name, family in self._families.items():
            shown, kind = name, family.kind
            if openmetrics and kind == b"counter":
                shown = name.removesuffix(b"_total")
                if shown == name:  # it would not be a counter there
                    kind = b"untyped"
            if openmetrics and kind == b"untyped":
                kind = b"unknown"
            yield b"# HELP %b %b\n# TYPE %b %b\n" % (shown, family.text, shown, kind)
            yield from family.lines
