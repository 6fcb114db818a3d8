"""What findings are, and the words that they share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from distexp.report.data.repeats import RunGroup

MOST = 6  # of one kind


@dataclass(frozen=True)
class Finding:
    """A sentence, and the question of the workshop that it answers."""

    text: str
    question: str | None = None


def first_few(findings: Iterable[Finding]) -> Iterator[Finding]:
    """The first of many, and how many there are more."""
    found = list(findings)
    yield from found[:MOST]
    if len(found) > MOST:
        yield Finding(f"{len(found) - MOST} more such cases are in the table of runs.", found[0].question)


def listed(names: Iterable[str]) -> str:
    """The first of some names, and how many there are more."""
    known = list(names)
    return ", ".join(known[:MOST]) + (f" and {len(known) - MOST} more" if len(known) > MOST else "")


def mean_of(group: RunGroup, name: str) -> float:
    """A figure that is known to be there."""
    figure = group.metric(name)
    assert figure is not None
    return figure.mean


def capital(text: str) -> str:
    """The same with a large first letter."""
    return text[:1].upper() + text[1:]
