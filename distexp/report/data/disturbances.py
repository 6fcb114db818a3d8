"""Sentences about runs that something else slowed down."""

from __future__ import annotations

from collections.abc import Iterator

from distexp.report.data.overview import DISTURBED_MARK, Overview
from distexp.report.data.scaling_remarks import explain_slow_baseline
from distexp.report.data.text import name_runs

MAX_DISTURBED = 4
MARK_NOTE = "This run, or the run it is compared with, was slowed down by another program. Such speeds are not ranked."


def describe_disturbances(overview: Overview) -> Iterator[str]:
    """Yield each such run with what shows it, and what the report does not conclude from it."""
    found = list(_disturbed_runs(overview))
    yield from found[:MAX_DISTURBED]
    if len(found) > MAX_DISTURBED:
        more = len(found) - MAX_DISTURBED
        yield f"{more} more {'was' if more == 1 else 'were'} disturbed."
    large = [group.label for group in overview.groups if overview.exceeds_workers(group)]
    if large and overview.baseline is not None and not overview.baseline.disturbance:
        their = "its number" if len(large) == 1 else "their number"
        start = f"{DISTURBED_MARK}: The speedup of {name_runs(large)} is larger than {their} of workers."
        yield f"{start} Do not trust the baseline, {overview.describe(overview.baseline)}."
        yield explain_slow_baseline(overview.baseline)
    if any(group.disturbance for group in overview.groups):
        yield f"{DISTURBED_MARK}: {MARK_NOTE}"
        yield "Repeat these runs when no other program needs the machine."


def _disturbed_runs(overview: Overview) -> Iterator[str]:
    """Yield a message about each disturbed training, and each disturbed run whose repeats were not."""
    for group in overview.groups:
        if reason := group.disturbance:
            yield f"{_capitalize(overview.describe(group))} was disturbed: {reason}."
            continue
        for row in group.counted_rows:
            if row.disturbance:
                label = _capitalize(overview.describe(group, row.label))
                yield f"{label} was disturbed: {row.disturbance}. Its speed does not count, that of its repeats does."


def _capitalize(text: str) -> str:
    return text[0].upper() + text[1:]
