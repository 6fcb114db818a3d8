"""The step model of a rank: the items of its median profiled step."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from distexp.measure.profiling.chrome_trace import FSDP_HOOK, Kernel, Trace, TraceCollective
from distexp.measure.profiling.cpu_waits import waits_for_gpu
from distexp.measure.profiling.fsdp_hooks import HookCollective, collectives_of_hooks
from distexp.measure.profiling.intervals import Interval, clip, merge, total_length
from distexp.measure.profiling.phases import StepPhases, find_phases
from distexp.measure.profiling.rank_summary import MedianStep
from distexp.runs.step_model import FORWARD, OPTIMIZER, Collective, Item, Segment
from distexp.system.torch_internals.fsdp import FSDPUnitSize

CHUNKS = 24
"""Segments of a pass without collectives, so that a forecast can insert some."""
QUEUE_GAP_S = 10e-6
"""Longest time that a GPU needs to start a kernel that is in its queue. It counts as part of the kernel."""
REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
FSDP_REDUCTION = f"{FSDP_HOOK}post_backward_reduce"


@dataclass(frozen=True)
class ProfiledStep:
    """One step of a rank.

    Attributes:
        trace: Events of the rank.
        median: Position and parts of the step, and the collectives of the rank in the order of their starts.
        workers: Number of workers.
        micro_batches: Micro-batches of a step.
        units: Sizes of FSDP's units by name; empty: no FSDP.
    """

    trace: Trace
    median: MedianStep
    workers: int
    micro_batches: int
    units: Mapping[str, FSDPUnitSize]


def items_of(step: ProfiledStep) -> tuple[Item, ...]:
    """Return the segments and collectives of a step, in the order of their launches.

    Of more than three micro-batches it has the first, the last, and the one of the others with the median duration.
    """
    trace, window = step.trace, step.trace.steps[step.median.position]
    hooks = [when[0] for name, when in trace.calls if name in REDUCTIONS or name.startswith(FSDP_REDUCTION)]
    phases = find_phases(window, trace.backward, trace.optimizer, micro_batches=step.micro_batches, hooks=hooks)
    collectives: list[tuple[float, Item]] = []
    for when, one in _collectives(step, phases):
        phase, micro_batch = phases.place(when)
        collectives.append((when, replace(one, phase=phase, micro_batch=micro_batch)))
    segments = _segments(step, phases, [when for when, _ in collectives])
    ordered = sorted([*collectives, *segments], key=lambda timed: (timed[0], isinstance(timed[1], Segment)))
    return _fewer_micro_batches([item for _, item in ordered])


Launched = tuple[float, Collective]
"""Time of the launch on the CPU, and the collective."""


def _collectives(step: ProfiledStep, phases: StepPhases) -> list[Launched]:
    """Return the collectives of the step, by their launch on the CPU."""
    hooks = collectives_of_hooks(step.trace.calls, step.units, phases)
    if step.workers == 1:
        return list(_calls(step, phases, hooks))
    found = sorted(step.trace.collectives, key=lambda one: one.when)
    starts = [one.launch[0] if one.launch else None for one in found]
    launches = _launches_with_gloo(step.trace, found) if None in starts else starts
    observed = [
        (when or one.when[0], _observed(one.kind, one.bytes, one.ranks or step.workers, transfer.transfer))
        for when, one, transfer in zip(launches, found, step.median.transfers, strict=True)
    ]
    first, last = phases.window
    inside = [(when, one) for when, one in observed if first <= when < last]
    return _with_sizes_of_hooks(inside, hooks)


def _launches_with_gloo(trace: Trace, collectives: Sequence[TraceCollective]) -> list[float | None]:
    """Return when the CPU called each collective: in the last call before a thread of gloo starts it."""
    calls = sorted(when[0] for name, when in trace.calls if not name.startswith(FSDP_HOOK))
    found: list[float | None] = []
    for one in collectives:
        position = bisect_right(calls, one.when[0]) - 1
        found.append(calls.pop(position) if position >= 0 else None)
    return found


def _observed(kind: str, size: int | None, ranks: int, transfer: Interval) -> Collective:
    return Collective(kind, size, ranks, "all", FORWARD, 0, transfer_s=transfer[1] - transfer[0])


def _calls(step: ProfiledStep, phases: StepPhases, hooks: Sequence[HookCollective]) -> Iterator[Launched]:
    """Yield the collectives that one worker calls and does not execute, or those of FSDP's hooks."""
    first, last = phases.window
    for hook in hooks:
        yield hook.when, Collective(hook.kind, hook.bytes, 1, "shard", FORWARD, 0)
    sharded = {hook.kind for hook in hooks}
    for name, when in step.trace.calls:
        if not name.startswith(FSDP_HOOK) and first <= when[0] < last and name not in (*sharded, "barrier"):
            yield when[0], Collective(name, None, 1, "all", FORWARD, 0)


def _with_sizes_of_hooks(observed: list[Launched], hooks: Sequence[HookCollective]) -> list[Launched]:
    """Return collectives of gloo with the sizes of FSDP's hooks: each hook starts the next collective.

    gloo executes a reduce-scatter as an all-reduce, which gets the kind of the hook.
    """
    found = sorted(observed, key=lambda timed: timed[0])
    starts = [when for when, _ in found]
    for hook in hooks:
        position = bisect_left(starts, hook.when)
        if position < len(found) and found[position][1].bytes is None:
            when, one = found[position]
            found[position] = when, replace(one, kind=hook.kind, bytes=hook.bytes, axis="shard")
    return found


def _segments(step: ProfiledStep, phases: StepPhases, launches: Sequence[float]) -> list[tuple[float, Item]]:
    """Return the work of the step between collectives, edges of phases and waits, by its start on the CPU."""
    trace, (first, last) = step.trace, phases.window
    waits = merge(clip(_waits(step), phases.window))
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


def _waits(step: ProfiledStep) -> list[Interval]:
    """Return when the CPU waits: for the GPU or its full queue, or without a GPU for collectives."""
    if step.trace.on_gpu:
        return waits_for_gpu(step.trace)
    return [*step.median.parts.parts["exposed_communication"], *step.median.parts.parts["waiting"]]


def _launch(kernel: Kernel) -> Interval:
    assert kernel.launch is not None
    return kernel.launch


def _durations(trace: Trace) -> dict[int, float]:
    """Return the time that each kernel occupies the GPU, by its identity.

    Time at which several kernels run counts once. The start of a kernel that is in the queue counts as part of it.
    """
    found: dict[int, float] = {}
    busy = float("-inf")
    for event in sorted(trace.device_events, key=lambda event: event.when):
        start, end = event.when
        queued = event.launch is not None and event.launch[1] <= busy and start - busy <= QUEUE_GAP_S
        if isinstance(event, Kernel):
            found[id(event)] = max(0.0, end - max(busy, start)) + (max(0.0, start - busy) if queued else 0.0)
            busy = max(busy, end)
    return found


def _segment(
    when: Interval, kernels: Sequence[Kernel], durations: Mapping[int, float], waits: Sequence[Interval]
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
