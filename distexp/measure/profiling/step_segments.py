"""The step model of a rank: the items of its median profiled step; and the lanes of that step for a picture."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from distexp.measure.profiling import breakdown, chrome_trace
from distexp.measure.profiling.intervals import Interval, Spans, clip, merge, partition, total_length
from distexp.measure.profiling.phases import Launched, StepPhases, collectives_of_hooks, find_phases, waits_for_gpu
from distexp.runs.step_files import COPIES, FORWARD, OPTIMIZER, REDUCTIONS, Collective, Item, Segment
from distexp.system.torch_internals.collectives import FSDPUnitSize, has_several_groups

CHUNKS = 24  # segments of a pass without collectives, so that a forecast can insert some
QUEUE_GAP_S = 10e-6  # longest time until a kernel in the queue starts; it counts as part of the kernel


@dataclass(frozen=True)
class ProfiledStep:
    """One step of a rank."""

    trace: chrome_trace.Trace  # events of the rank
    median: MedianStep  # position and parts of the step, and the collectives of the rank in the order of their starts
    workers: int  # number of workers
    micro_batches: int  # micro-batches of a step
    units: Mapping[str, FSDPUnitSize]  # sizes of FSDP's units by name; empty: no FSDP


def items_of(step: ProfiledStep) -> tuple[Item, ...]:
    """Return segments and collectives by their launches, of at most three micro-batches: first, median and last."""
    trace, window = step.trace, step.trace.steps[step.median.position]
    of_fsdp = f"{chrome_trace.FSDP_HOOK}post_backward_reduce"
    # Workers that share matrices reduce activations in each pass, so these do not show its end.
    shown = () if step.units and all(unit.workers == 1 for unit in step.units.values()) else REDUCTIONS
    hooks = [when[0] for name, when in trace.calls if name in shown or name.startswith(of_fsdp)]
    phases = find_phases(window, trace.backward, trace.optimizer, micro_batches=step.micro_batches, hooks=hooks)
    collectives: list[tuple[float, Item]] = []
    for when, one in _collectives(step, phases):
        phase, micro_batch = phases.place(when)
        collectives.append((when, replace(one, phase=phase, micro_batch=micro_batch)))
    segments = _segments(step, phases, [when for when, _ in collectives])
    ordered = sorted([*collectives, *segments], key=lambda timed: (timed[0], isinstance(timed[1], Segment)))
    return _fewer_micro_batches([item for _, item in ordered])


def _collectives(step: ProfiledStep, phases: StepPhases) -> list[Launched]:
    """Return the collectives of the step, by their launch on the CPU."""
    single = step.workers == 1
    alone = {name: unit for name, unit in step.units.items() if unit.workers == 1 and not single}
    units = {name: unit for name, unit in step.units.items() if name not in alone}
    hooks = collectives_of_hooks(step.trace.calls, units, phases)
    if single:
        return list(_calls(step, phases, hooks))
    found = sorted(step.trace.collectives, key=lambda one: one.when)
    starts = [one.launch[0] if one.launch else None for one in found]
    launches = _launches_with_gloo(step.trace, found) if None in starts else starts
    observed = []
    for launch, one, split in zip(launches, found, step.median.transfers, strict=True):
        transfer_s, ranks = split.transfer[1] - split.transfer[0], one.ranks or step.workers
        collective = Collective(one.kind, one.bytes, ranks, "all", FORWARD, 0, transfer_s=transfer_s)
        observed.append((launch or one.when[0], collective))
    first, last = phases.window
    executed = _with_sizes_of_hooks([timed for timed in observed if first <= timed[0] < last], hooks)
    # A single group that shares a model sends nothing for these units. Several groups would.
    copied = collectives_of_hooks(step.trace.calls, alone, phases)
    for when, hook in copied:
        _remove_lone(executed, when, hook.kind)
    return [*executed, *((when, replace(hook, axis=COPIES)) for when, hook in copied)]


def _remove_lone(executed: list[Launched], when: float, kind: str) -> None:
    """Remove the reduction that a hook starts with one worker only: DDP calls it anyway. gloo does not state ranks."""
    for position, (start, other) in enumerate(executed):
        if start >= when and other.kind == kind == "all_reduce" and (other.ranks == 1 or other.bytes is None):
            del executed[position]
            return


def _launches_with_gloo(
    trace: chrome_trace.Trace, collectives: Sequence[chrome_trace.TraceCollective]
) -> list[float | None]:
    """Return when the CPU called each collective: in the last call before a thread of gloo starts it."""
    calls = sorted(when[0] for name, when in trace.calls if not name.startswith(chrome_trace.FSDP_HOOK))
    found: list[float | None] = []
    for one in collectives:
        position = bisect_right(calls, one.when[0]) - 1
        found.append(calls.pop(position) if position >= 0 else None)
    return found


def _calls(step: ProfiledStep, phases: StepPhases, hooks: Sequence[Launched]) -> Iterator[Launched]:
    """Yield the collectives that one worker calls and does not execute, or those of FSDP's hooks."""
    yield from hooks
    (first, last), known = phases.window, {"barrier", *(hook.kind for _, hook in hooks)}
    for name, (when, _) in step.trace.calls:
        if not name.startswith(chrome_trace.FSDP_HOOK) and first <= when < last and name not in known:
            yield when, Collective(name, None, 1, "all", FORWARD, 0)


def _with_sizes_of_hooks(observed: list[Launched], hooks: Sequence[Launched]) -> list[Launched]:
    """Return collectives of gloo with kinds and sizes of FSDP's hooks: each hook starts the next collective."""
    found = sorted(observed, key=lambda timed: timed[0])
    starts = [when for when, _ in found]
    for start, hook in hooks:
        position = bisect_left(starts, start)
        if position < len(found) and found[position][1].bytes is None:
            when, one = found[position]
            axis = "shard" if hook.kind != "all_reduce" else one.axis
            found[position] = when, replace(one, kind=hook.kind, bytes=hook.bytes, axis=axis)
    return found


def _segments(step: ProfiledStep, phases: StepPhases, launches: Sequence[float]) -> list[tuple[float, Item]]:
    """Return the work of the step between collectives, edges of phases and waits, by its start on the CPU."""
    trace, (first, last) = step.trace, phases.window
    parts = step.median.parts.parts
    # The CPU waits for the GPU or its full queue, or without a GPU for collectives.
    waiting = waits_for_gpu(trace) if trace.on_gpu else [
        when for name in ("exposed_communication", "waiting", "bubble") for when in parts[name]
    ]  # fmt: skip
    waits = merge(clip(waiting, phases.window))
    synchronized = [end for _, end in merge(clip(trace.synchronizations, phases.window))]
    edges = sorted({*phases.edges(), *synchronized, *launches})
    cuts = [cut for a, b in pairwise(edges) for cut in _chunks(a, b, (last - first) / CHUNKS)] + [last]
    kernels = sorted((k for k in trace.kernels if k.launch is not None), key=_launch)
    durations = _durations(trace)
    starts = [_launch(kernel)[0] for kernel in kernels]
    ends = set(synchronized)
    found: list[tuple[float, Item]] = []
    for a, b in pairwise(cuts):
        inside = kernels[bisect_left(starts, a) : bisect_left(starts, b)]
        segment = _segment((a, b), inside, durations, waits)
        if segment.host_s > 0 or inside or b in ends:
            phase, micro_batch = phases.place(a)
            found.append((a, replace(segment, phase=phase, micro_batch=micro_batch, waits=b in ends)))
    return found


def _chunks(start: float, end: float, longest: float) -> Iterator[float]:
    """Yield the start of each chunk of an interval; none is longer than a limit."""
    count = max(1, round((end - start) / longest + 0.499))
    yield from (start + i * (end - start) / count for i in range(count))


def _launch(kernel: chrome_trace.Kernel) -> Interval:
    assert kernel.launch is not None
    return kernel.launch


def _durations(trace: chrome_trace.Trace) -> dict[int, float]:
    """Return the time that each kernel occupies the GPU alone, with its start from the queue, by its identity."""
    found: dict[int, float] = {}
    busy = float("-inf")
    for event in sorted(trace.device_events, key=lambda event: event.when):
        start, end = event.when
        queued = event.launch is not None and event.launch[1] <= busy and start - busy <= QUEUE_GAP_S
        if isinstance(event, chrome_trace.Kernel):
            found[id(event)] = max(0.0, end - max(busy, start)) + (max(0.0, start - busy) if queued else 0.0)
            busy = max(busy, end)
    return found


def _segment(
    when: Interval, kernels: Sequence[chrome_trace.Kernel], durations: Mapping[int, float], waits: Sequence[Interval]
) -> Segment:
    """Return the segment of a time of the CPU, without its place in the step."""
    host = _busy(when[0], when[1], waits)
    device = tail = half = 0.0
    for kernel in reversed(kernels):
        device += durations[id(kernel)]
        offset = _busy(when[0], min(_launch(kernel)[1], when[1]), waits)
        tail, half = max(tail, offset + device), max(half, offset / 2 + device)
    return Segment(FORWARD, 0, host, device, max(tail, device), max(half, device), len(kernels))


def _busy(start: float, end: float, waits: Sequence[Interval]) -> float:
    """Return the time of the CPU without the waits, which are sorted and disjoint."""
    first = max(0, bisect_right(waits, (start, float("inf"))) - 1)
    last = bisect_left(waits, (end, 0.0))
    return max(0.0, end - start - total_length(clip(waits[first:last], (start, end))))


def _fewer_micro_batches(items: Sequence[Item]) -> tuple[Item, ...]:
    """Return the items without all but one of the micro-batches between the first and the last."""
    last = max((item.micro_batch for item in items), default=0)
    times: dict[int, float] = dict.fromkeys(range(1, last), 0.0)
    for item in items:
        if isinstance(item, Segment) and item.micro_batch in times and item.phase != OPTIMIZER:
            times[item.micro_batch] += item.device_s or item.host_s
    kept = sorted(times, key=lambda number: times[number])[(len(times) - 1) // 2 :][:1]
    return tuple(item for item in items if item.micro_batch in (0, *kept, last))


MAX_SPANS = 400  # Most spans of a lane. With more, the step is divided into so many cells, each with its longest label.
GAP = 0.002  # spans are merged if the gap between them is a smaller fraction of the step

Layers = Sequence[tuple[str, Sequence[Interval]]]


def lanes_of(
    trace: chrome_trace.Trace, step: breakdown.StepParts, collectives: Sequence[breakdown.Transfer], rank: int
) -> dict[str, Any]:
    """Return the entry of a rank in ``profile/summary.json``: lanes of computation, collectives and the CPU."""
    kinds, start = sorted({one.kind for one in collectives}), step.window[0]
    compute = {"matmul": chrome_trace.MATMUL, "other_kernels": chrome_trace.OTHER_KERNEL, "optimizer": "optimizer"}
    layers: dict[str, Layers] = {
        "compute": [(label, step.parts[part]) for part, label in compute.items()],
        "communication": [
            *((kind, [one.transfer for one in collectives if one.kind == kind]) for kind in kinds),
            ("waiting", [one.wait for one in collectives]),
        ],
        "cpu": [
            ("data", trace.data),
            ("optimizer", trace.optimizer),
            ("backward", trace.backward),
            ("forward", [when for intervals in trace.operators.values() for when in intervals]),
        ],
    }
    lanes = []
    for name, lane in layers.items():
        spans = _paint(step.window, lane)
        times = [[round(1000 * (a - start), 4), round(1000 * (b - start), 4), label] for (a, b), label in spans]
        lanes.append({"name": name, "spans": times})
    return {"rank": rank, "step_ms": 1000 * step.duration, "lanes": lanes}


def _paint(window: Interval, layers: Layers) -> Spans:
    """Return disjoint spans in the order of time."""
    joined = _join(sorted(partition(window, layers)[0]), GAP * (window[1] - window[0]))
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


@dataclass(frozen=True)
class RankSummary:
    """What the other ranks need to know of the trace of a rank."""

    shares: chrome_trace.CommunicationShares
    step_s: list[float]  # duration of each profiled step
    collectives: breakdown.Durations

    @classmethod
    def of(cls, trace: chrome_trace.Trace) -> RankSummary:
        """Return the summary of a trace."""
        durations = [end - start for start, end in breakdown.step_windows(trace)]
        collectives = breakdown.durations_of(trace.collectives, several_groups=has_several_groups())
        return cls(chrome_trace.communication_shares(trace), durations, collectives)


@dataclass(frozen=True)
class MedianStep:
    """The profiled step of a rank whose duration is the median, as a mean over the ranks."""

    position: int  # number of the step in the trace, the same for all ranks
    transfers: list[breakdown.Transfer]  # collectives of the trace, with the waiting for other ranks
    parts: breakdown.StepParts  # parts of the step

    @classmethod
    def of(
        cls, trace: chrome_trace.Trace, ranks: Sequence[RankSummary], stages: Mapping[str, str] = breakdown.NO_STAGES
    ) -> MedianStep:
        """Return the median step of a rank. Raises ValueError if the ranks have different numbers of steps.

        ``stages`` is as in ``split_step``.
        """
        if len({len(rank.step_s) for rank in ranks}) > 1:
            raise ValueError("the ranks have different numbers of profiled steps")
        totals = [sum(durations) for durations in zip(*(rank.step_s for rank in ranks), strict=True)]
        position = sorted(range(len(totals)), key=lambda number: totals[number])[(len(totals) - 1) // 2]
        transfers = breakdown.split_collectives(trace.collectives, [rank.collectives for rank in ranks])
        window = breakdown.step_windows(trace)[position]
        return cls(position, transfers, breakdown.split_step(trace, window, transfers, stages))
