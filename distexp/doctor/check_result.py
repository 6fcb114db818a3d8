"""Result of one check."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckResult:
    """Result of one check; ``hint`` is set unless the state is ok."""

    name: str
    state: str  # ok, warning, missing
    found: str
    hint: str | None = None


def ok(name: str, found: str) -> CheckResult:
    """Return the result of a check that passed."""
    return CheckResult(name, "ok", found)


def warning(name: str, found: str, hint: str) -> CheckResult:
    """Return the result of a check that passed in part."""
    return CheckResult(name, "warning", found, hint)


def missing(name: str, found: str, hint: str) -> CheckResult:
    """Return the result of a check that failed."""
    return CheckResult(name, "missing", found, hint)
