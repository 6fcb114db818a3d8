"""Lanes of one profiled step: what computation, communication and the CPU of each rank do at which time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distexp.runs.entry_values import number_of, texts_of
from distexp.runs.profile_summary import read_profile_summary
from distexp.runs.step_parts import PARTS
from distexp.runs.typed_values import matches

LANES = {"compute": "compute", "communication": "communication", "cpu": "CPU"}
"""Titles of the lanes, in their order."""
TITLES = {
    "matmul": PARTS["matmul"], "other kernel": PARTS["other_kernels"], "waiting": PARTS["waiting"],
    "data": PARTS["data_wait"],
}  # fmt: skip
"""Titles of labels that are parts of a step with another name."""
MAX_SPANS = 2000  # of a lane; a run writes fewer


@dataclass(frozen=True)
class Span:
    """An interval of a lane, in milliseconds since the start of the step."""

    begin_ms: float
    end_ms: float
    label: str


@dataclass(frozen=True)
class RankLanes:
    """The lanes of a rank by title."""

    rank: int
    step_ms: float
    lanes: dict[str, tuple[Span, ...]]


def read_lanes(run_dir: Path) -> tuple[RankLanes, ...]:
    """Return the lanes of all ranks of a run; empty if it was not profiled, or if the file is damaged."""
    content = read_profile_summary(run_dir)
    if content is None:
        return ()
    labels = texts_of(content, "labels")
    found = [_read_rank(entry, labels) for entry in _list(content.get("ranks")) if isinstance(entry, dict)]
    return tuple(sorted((lane for lane in found if lane is not None), key=lambda lane: lane.rank))


def _read_rank(entry: dict[str, Any], labels: Sequence[str]) -> RankLanes | None:
    rank, step = number_of(entry, "rank"), number_of(entry, "step_ms")
    if rank is None or not step:
        return None
    lanes = [lane for lane in _list(entry.get("lanes")) if isinstance(lane, dict)]
    spans = {
        title: tuple(_read_spans(lane.get("spans"), labels))
        for name, title in LANES.items() for lane in lanes if lane.get("name") == name
    }  # fmt: skip
    drawn = {title: intervals for title, intervals in spans.items() if intervals}
    return RankLanes(int(rank), step, drawn) if drawn else None


def _read_spans(spans: Any, labels: Sequence[str]) -> Iterator[Span]:
    for span in _list(spans)[:MAX_SPANS]:
        if matches(span, list[float]) and len(span) == 3 and None not in span and 0 <= span[2] < len(labels):
            label = labels[int(span[2])]
            yield Span(float(span[0]), float(span[1]), TITLES.get(label, label))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
