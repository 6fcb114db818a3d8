"""Sentences about runs that something else slowed down."""

from __future__ import annotations

from collections.abc import Iterator

from distexp.report.data.overview import DISTURBED_MARK, Overview

MAX_DISTURBED = 4


def describe_disturbances(overview: Overview) -> Iterator[str]:
    """Yield each such run with what shows it, and what the report does not conclude from it."""
    found = [(group, reason) for group in overview.groups if (reason := group.disturbance)]
    for group, reason in found[:MAX_DISTURBED]:
        label = overview.describe(group)
        yield f"{label[0].upper()}{label[1:]} was disturbed: {reason}."
    if len(found) > MAX_DISTURBED:
        yield f"{len(found) - MAX_DISTURBED} more were disturbed."
    if found:
        yield f"{DISTURBED_MARK}: disturbed, or relative to a disturbed run. Such speeds are not ranked."
        yield "Repeat these runs when no other program needs the machine."
