"""The result of a check, and the advice."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Severity(StrEnum):
    """The result of a check, the worst first."""

    ERROR = "error"
    WARNING = "warning"
    OK = "ok"
    NOT_APPLICABLE = "not applicable"


class Finding(msgspec.Struct, frozen=True):
    """The result of ``check``: what was ``found``, and for errors and warnings the ``advice``."""

    check: str
    level: Severity
    found: str
    advice: str = ""


def ok(check: str, found: str) -> Finding:
    return Finding(check, Severity.OK, found)


def warning(check: str, found: str, advice: str) -> Finding:
    return Finding(check, Severity.WARNING, found, advice)


def error(check: str, found: str, advice: str) -> Finding:
    return Finding(check, Severity.ERROR, found, advice)


def not_applicable(check: str, why: str) -> Finding:
    return Finding(check, Severity.NOT_APPLICABLE, why)


def by_importance(findings: list[Finding]) -> list[Finding]:
    """The worst first; those of one level in the order of the checks."""
    levels = list(Severity)
    return sorted(findings, key=lambda finding: levels.index(finding.level))
