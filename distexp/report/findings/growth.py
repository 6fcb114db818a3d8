"""The sentences under the scaling curves, and the pairs of equal worlds on one node and on several."""

from __future__ import annotations

from collections.abc import Iterator

from distexp.report.data.metrics import COMMUNICATION, EXPOSED, MEMORIES, SPEED
from distexp.report.data.overview import Overview
from distexp.report.data.repeats import is_within_noise
from distexp.report.data.scaling import ScalingPoint, ScalingSeries
from distexp.report.data.text_table import TextTable
from distexp.report.findings.base import Finding, capital, first_few

MOST_ROWS = 40
STABLE = 0.05  # relative
FASTER = "Does training get faster as workers are added?"
CONSTANT = "In weak scaling, do the samples/s remain constant?"
PEAK = "Should the peak memory per worker remain constant?"
AVERAGE = "Does the average memory increase, decrease, or stay stable?"
NODES = "What do several nodes cost against one?"
TALK = "How much of a step is communication?"
AVERAGES = {"gpu_average_mib": "average GPU memory", "cpu_average_mib": "average CPU memory of a node"}


def growth_findings(overview: Overview) -> Iterator[Finding]:
    """Under the scaling curves."""
    for kind, tell in (("strong", _strong), ("weak", _weak), ("mixed", _mixed)):
        grown = [each for each in overview.series if each.kind == kind and _grew(each)]
        yield from first_few(tell(each) for each in grown)
    grown = [each for each in overview.series if _grew(each)]
    yield from first_few(finding for each in grown for finding in _memory(each, list(MEMORIES.items())[:2], PEAK))
    yield from first_few(finding for each in grown for finding in _memory(each, list(AVERAGES.items()), AVERAGE))
    yield from first_few(finding for each in overview.series for finding in _communication(each))
    yield from first_few(_crossing(each, *pair) for each in overview.series for pair in each.node_pairs())


def pairs_table(overview: Overview) -> TextTable | None:
    """Equal numbers of workers on few nodes and on more; None where there are none."""
    rows = tuple(
        (
            series.name or "-", str(few.workers), _shape(few), f"{few.speed:,.1f}", _shape(more), f"{more.speed:,.1f}",
            f"{more.speed / few.speed:.2f}",
        )
        for series in overview.series for few, more in series.node_pairs()
    )  # fmt: skip
    if not rows:
        return None
    shape = "nodes x workers a node"
    header = ("configuration", "workers", f"few: {shape}", "samples/s", f"more: {shape}", "samples/s", "more / few")
    return TextTable("Equal numbers of workers on few nodes and on more", header, rows)


def growth_table(overview: Overview) -> TextTable | None:
    """What each training of a series had to do and how it did; None where nothing was scaled."""
    rows = tuple(_growth_row(series, point) for series in overview.series for point in series.points)
    if not rows:
        return None
    header = ("configuration", "nodes x workers a node", "parameters", "samples a worker", "work a worker",
              "time (s)", "samples/s", "speed-up", "efficiency")  # fmt: skip
    more = f"{len(rows) - MOST_ROWS} more are in results.csv." if len(rows) > MOST_ROWS else ""
    return TextTable("Work and efficiency", header, rows[:MOST_ROWS], more)


def _growth_row(series: ScalingSeries, point: ScalingPoint) -> tuple[str, ...]:
    built = point.group.counted_rows[0].record.built
    known, first = point.samples is not None, series.baseline
    return (
        f"{series.name} ({series.kind})" if series.name else series.kind, _shape(point),
        f"{built.parameters:,}" if built else "-",
        f"{point.samples / point.workers:,.0f}" if point.samples is not None else "-",
        f"{point.work / point.workers / (first.work / first.workers):.2f}",
        f"{point.time:,.2f}" if known else "-", f"{point.speed:,.1f}", f"{point.speedup:.2f}",
        f"{point.efficiency:.0%}",
    )  # fmt: skip


def _grew(series: ScalingSeries) -> bool:
    return series.points[-1].workers > series.baseline.workers


def _named(series: ScalingSeries) -> str:
    return f"{series.name}: " if series.name else ""


def _span(series: ScalingSeries) -> tuple[ScalingPoint, ScalingPoint, float]:
    """The fewest and the most workers, and their ratio."""
    first, last = series.baseline, series.points[-1]
    return first, last, last.workers / first.workers


def _strong(series: ScalingSeries) -> Finding:
    first, last, ratio = _span(series)
    text = (
        f"{_named(series)}from {first.workers} to {last.workers} workers the same work becomes {last.speedup:.2f}x as "
        f"fast, where {ratio:g}x is ideal: efficiency {last.efficiency:.0%}"
    )
    best = max(series.points, key=lambda point: point.speedup)
    if best.workers < last.workers:
        text += f"; {best.workers} workers are faster, {best.speedup:.2f}x"
    return Finding(capital(text) + ".", FASTER)


def _weak(series: ScalingSeries) -> Finding:
    first, last, ratio = _span(series)
    parts = [
        f"{_named(series)}they should grow with the workers, and the time remain constant: from {first.workers} to "
        f"{last.workers} workers the work done in a second grew {last.speedup:.2f}x, where {ratio:g}x is ideal",
        f"each worker's share took {last.relative_time:.2f}x the time: efficiency {last.efficiency:.0%}",
    ]
    return Finding(capital("; ".join(parts)) + ".", CONSTANT)


def _mixed(series: ScalingSeries) -> Finding:
    first, last, _ = _span(series)
    total, share = last.work / first.work, last.work / last.workers / (first.work / first.workers)
    text = (
        f"{_named(series)}neither strong nor weak scaling: from {first.workers} to {last.workers} workers the work "
        f"(samples x parameters) changes {total:.2f}x in all and {share:.2f}x per worker; per unit of work the "
        f"efficiency is {last.efficiency:.0%}."
    )
    return Finding(capital(text))


def _memory(series: ScalingSeries, names: list[tuple[str, str]], question: str) -> Iterator[Finding]:
    """What becomes of the first memory that both ends of a series have."""
    first, last, _ = _span(series)
    for name, said in names:
        before, after = first.group.metric(name), last.group.metric(name)
        if before is None or after is None or not before.mean:
            continue
        change = after.mean / before.mean - 1
        became = "stays stable" if abs(change) <= STABLE else "increases" if change > 0 else "decreases"
        reason = ""
        if change < -STABLE and _shards(last):
            reason = "; sharding leaves each worker a smaller part as workers are added"
        yield Finding(
            capital(f"{_named(series)}{said} {became} from {first.workers} to {last.workers} workers, "
                    f"{before.mean:,.0f} to {after.mean:,.0f} MiB ({change:+.1%}){reason}."), question)  # fmt: skip
        return


def _communication(series: ScalingSeries) -> Iterator[Finding]:
    """The shares at both ends of what was profiled; a lone worker has nobody to talk to."""
    told = [(point, share.mean) for point in series.points
            if point.workers > 1 and (share := point.group.metric(COMMUNICATION))]  # fmt: skip
    if not told:
        return
    (few, less), (most, more) = told[0], told[-1]
    text = f"{_named(series)}at {_place(most)} {more:.0f}% of a step was communication{_exposed(most)}"
    if few is not most:
        text += f", at {_place(few)} {less:.0f}%{_exposed(few)}"
    yield Finding(capital(text) + ".", TALK)


def _place(point: ScalingPoint) -> str:
    nodes = f" on {point.nodes} nodes" if point.nodes > 1 else ""
    return f"{point.workers} workers{nodes}"


def _exposed(point: ScalingPoint) -> str:
    exposed = point.group.metric(EXPOSED)
    return "" if exposed is None else f" ({exposed.mean:.0f}% not hidden behind computing)"


def _shards(point: ScalingPoint) -> bool:
    """Whether states are partitioned over workers, as read off the live objects."""
    built = point.group.counted_rows[0].record.built
    return built is not None and len(built.mesh) > 1 and built.mesh[1] > 1


def _shape(point: ScalingPoint) -> str:
    return f"{point.nodes} x {point.workers // point.nodes}"


def _crossing(series: ScalingSeries, few: ScalingPoint, more: ScalingPoint) -> Finding:
    ratio = more.speed / few.speed
    one, other = few.group.metric(SPEED), more.group.metric(SPEED)
    chance = " (within the spread)" if one and other and is_within_noise(one, other) else ""
    verdict = f"costs {1 - ratio:.1%} of the speed" if ratio < 1 else f"gains {ratio - 1:.1%} of speed"
    text = (
        f"{_named(series)}{few.workers} workers as {_shape(more)} instead of {_shape(few)} (nodes x workers a node) "
        f"{verdict}: {more.speed:,.1f} against {few.speed:,.1f} samples/s{chance}."
    )
    return Finding(capital(text), NODES)
