"""Lanes of one step for a picture: computation, collectives, and the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from distexp.measure.profiling.breakdown import StepParts
from distexp.measure.profiling.categories import MATMUL, OTHER_KERNEL
from distexp.measure.profiling.chrome_trace import Trace
from distexp.measure.profiling.collective_waits import Transfer
from distexp.measure.profiling.intervals import Interval, clip, intersect, merge, subtract

MAX_SPANS = 400
"""Most spans of a lane. With more, the step is divided into so many cells, each with its longest label."""
GAP = 0.002
"""Spans are merged if the gap between them is a smaller fraction of the step."""

Spans = list[tuple[Interval, str]]


def lanes_of(trace: Trace, step: StepParts, collectives: Sequence[Transfer], rank: int) -> dict[str, Any]:
    """Return the entry of a rank in ``profile/summary.json``, with labels as text."""
    lanes = {
        "compute": _paint(step.window, _compute(step)),
        "communication": _paint(step.window, _communication(collectives)),
        "cpu": _paint(step.window, _cpu(trace)),
    }
    return {
        "rank": rank,
        "step_ms": 1000 * step.duration,
        "lanes": [{"name": name, "spans": _to_json(spans, step.window[0])} for name, spans in lanes.items()],
    }


def _compute(step: StepParts) -> Iterator[tuple[str, Sequence[Interval]]]:
    for part, label in (("matmul", MATMUL), ("other_kernels", OTHER_KERNEL), ("optimizer", "optimizer")):
        yield label, step.parts[part]


def _communication(collectives: Sequence[Transfer]) -> Iterator[tuple[str, Sequence[Interval]]]:
    for kind in sorted({collective.kind for collective in collectives}):
        yield kind, [collective.transfer for collective in collectives if collective.kind == kind]
    yield "waiting", [collective.wait for collective in collectives]


def _cpu(trace: Trace) -> Iterator[tuple[str, Sequence[Interval]]]:
    yield "data", trace.data
    yield "optimizer", trace.optimizer
    yield "backward", trace.backward
    yield "forward", [when for intervals in trace.operators.values() for when in intervals]


def _paint(window: Interval, layers: Iterator[tuple[str, Sequence[Interval]]]) -> Spans:
    """Return disjoint spans in the order of time. Where layers overlap, the first one counts."""
    left, spans = [window], []
    for label, intervals in layers:
        covered = merge(clip(intervals, window))
        spans += [(interval, label) for interval in intersect(left, covered)]
        left = subtract(left, covered)
    joined = _join(sorted(spans), GAP * (window[1] - window[0]))
    return joined if len(joined) <= MAX_SPANS else _rasterize(joined, window)


def _join(spans: Spans, gap: float) -> Spans:
    """Merge neighbors with the same label."""
    found: Spans = []
    for (start, end), label in spans:
        if found and found[-1][1] == label and start - found[-1][0][1] < gap:
            found[-1] = (found[-1][0][0], end), label
        else:
            found.append(((start, end), label))
    return found


def _rasterize(spans: Spans, window: Interval) -> Spans:
    """Return at most MAX_SPANS spans: each cell has the label that fills most of it, if half of it is filled."""
    start, width = window[0], (window[1] - window[0]) / MAX_SPANS
    cells: list[dict[str, float]] = [{} for _ in range(MAX_SPANS)]
    for (begin, end), label in spans:
        for index in range(int((begin - start) / width), min(MAX_SPANS, int((end - start) / width) + 1)):
            covered = min(end, start + (index + 1) * width) - max(begin, start + index * width)
            cells[index][label] = cells[index].get(label, 0.0) + max(0.0, covered)
    painted = [
        ((start + index * width, start + (index + 1) * width), max(cell, key=lambda label: cell[label]))
        for index, cell in enumerate(cells)
        if sum(cell.values()) >= width / 2
    ]
    return _join(painted, width / 2)


def _to_json(spans: Spans, start: float) -> list[list[Any]]:
    return [[round(1000 * (a - start), 4), round(1000 * (b - start), 4), label] for (a, b), label in spans]
