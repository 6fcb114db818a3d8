"""Partition of the profiled steps of one rank into what the time went to.

Each instant of a step belongs to exactly one part, so the parts add up to the step. On a GPU, kernels come first, then
collectives, then copies. The rest is idle time of the GPU, which is divided by what the CPU did. On a CPU, operators of
the training thread take the place of kernels.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from distexp.measure.profiling.categories import MATMUL, OTHER_KERNEL
from distexp.measure.profiling.chrome_trace import COPY, Kernel, Trace
from distexp.measure.profiling.collective_waits import Transfer
from distexp.measure.profiling.intervals import Interval, clip, intersect, merge, subtract, total_length
from distexp.runs.step_parts import PARTS

LONG_GAP_S = 1e-3
"""A longer idle time without a launch is work of the CPU. A shorter one is the time to launch a kernel."""


@dataclass(frozen=True)
class StepParts:
    """The parts of one step, as sorted, disjoint intervals in seconds."""

    window: Interval
    parts: dict[str, list[Interval]]
    hidden_communication_s: float
    launches: int | None  # calls that launched kernels; None on the CPU

    @property
    def duration(self) -> float:
        """Return the duration in seconds."""
        return self.window[1] - self.window[0]

    def milliseconds(self, name: str) -> float:
        """Return the length of a part."""
        return 1000 * total_length(self.parts[name])

    def to_json(self, rank: int, *, on_gpu: bool) -> dict[str, Any]:
        """Return the entry of ``metrics.step_breakdown``. Without a GPU nothing is known about launches."""
        entry = {f"{name}_ms": self.milliseconds(name) for name in PARTS}
        return {
            "rank": rank,
            "step_ms": 1000 * self.duration,
            **entry,
            **({} if on_gpu else {"launch_idle_ms": None}),
            "hidden_communication_ms": 1000 * self.hidden_communication_s,
            "launches": self.launches,
        }


def step_windows(trace: Trace) -> list[Interval]:
    """Return start and end of each step.

    The CPU is ahead of the GPU. So on a GPU a step ends when the last kernel that it launched has ended. The first step
    starts and the last one ends on the CPU, because the GPU is idle then.
    """
    if not trace.on_gpu:
        return list(trace.steps)
    starts = [start for start, _ in trace.steps]
    first, last = trace.window
    edges = [first] * (len(starts) + 1)
    for event in trace.device_events:
        step = max(0, bisect_right(starts, (event.launch or event.when)[0]) - 1)
        edges[step + 1] = max(edges[step + 1], min(event.when[1], last))
    for step in range(1, len(edges)):
        edges[step] = max(edges[step], edges[step - 1])
    edges[-1] = last
    return list(pairwise(edges))


def split_step(trace: Trace, window: Interval, collectives: Sequence[Transfer]) -> StepParts:
    """Return the parts of one step of a rank.

    Args:
        trace: Events of the rank.
        window: Start and end of the step.
        collectives: Collectives of the rank, with the waiting for other ranks.
    """
    running = [
        collective for collective in collectives if _overlaps((collective.wait[0], collective.transfer[1]), window)
    ]
    layers = _gpu_layers(trace, window, running) if trace.on_gpu else _cpu_layers(trace, window, running)
    parts: dict[str, list[Interval]] = {name: [] for name in PARTS}
    left = [window]
    for name, intervals in layers:
        covered = merge(clip(intervals, window))
        parts[name] += intersect(left, covered)
        left = subtract(left, covered)
    for name, interval in (
        _idle_parts(trace, left) if trace.on_gpu else (("host", interval_left) for interval_left in left)
    ):
        parts[name].append(interval)
    merged = {name: merge(intervals) for name, intervals in parts.items()}
    busy = total_length(
        merge(clip((when for collective in running for when in (collective.wait, collective.transfer)), window))
    )
    exposed = total_length(merged["exposed_communication"]) + total_length(merged["waiting"])
    launches = _count_launches(trace.kernels, window) if trace.on_gpu else None
    return StepParts(window, merged, max(0.0, busy - exposed), launches)


def _count_launches(kernels: Sequence[Kernel], window: Interval) -> int:
    """Return the number of calls that launched kernels. A CUDA graph is one."""
    launched = [kernel for kernel in kernels if kernel.category != COPY and window[0] <= kernel.when[0] < window[1]]
    return len({kernel.launch or kernel.when for kernel in launched})


Layers = Iterator[tuple[str, list[Interval]]]
"""Parts with their intervals; an instant belongs to the first layer that covers it."""


def _gpu_layers(trace: Trace, window: Interval, collectives: Sequence[Transfer]) -> Layers:
    optimizer = merge(trace.optimizer)
    kernels: dict[str, list[Interval]] = {MATMUL: [], OTHER_KERNEL: [], COPY: [], "optimizer": [], "optimizer copy": []}
    for kernel in trace.kernels:
        if not _overlaps(kernel.when, window):
            continue
        category = kernel.category
        if _is_inside(kernel, optimizer):
            category = "optimizer copy" if category == COPY else "optimizer"
        kernels[category].append(kernel.when)
    yield "matmul", kernels[MATMUL]
    yield "other_kernels", kernels[OTHER_KERNEL]
    yield "optimizer", kernels["optimizer"]
    yield from _communication_layers(collectives)
    yield "optimizer", kernels["optimizer copy"]
    yield "other_kernels", kernels[COPY]


def _cpu_layers(trace: Trace, window: Interval, collectives: Sequence[Transfer]) -> Layers:
    optimizer = merge(clip(trace.optimizer, window))
    operators = {name: merge(clip(trace.operators[name], window)) for name in (MATMUL, OTHER_KERNEL)}
    yield "data_wait", trace.data
    yield "optimizer", intersect(merge([*operators[MATMUL], *operators[OTHER_KERNEL]]), optimizer)
    yield "matmul", operators[MATMUL]
    yield "other_kernels", operators[OTHER_KERNEL]
    yield from _communication_layers(collectives)
    yield "optimizer", optimizer


def _communication_layers(collectives: Sequence[Transfer]) -> Layers:
    """Yield the transfers, then the waiting: an instant in which one collective transfers is no waiting."""
    yield "exposed_communication", [collective.transfer for collective in collectives]
    yield "waiting", [collective.wait for collective in collectives]


def _idle_parts(trace: Trace, idle: Sequence[Interval]) -> Iterator[tuple[str, Interval]]:
    """Yield the part of each interval in which the GPU was idle."""
    data, optimizer = merge(trace.data), merge(trace.optimizer)
    for interval in intersect(idle, data):
        yield "data_wait", interval
    events = sorted(trace.device_events, key=lambda event: event.when[0])
    starts = [event.when[0] for event in events]
    for gap in subtract(idle, data):
        position = bisect_right(starts, gap[0])
        following = events[position] if position < len(events) else None
        if following is not None and following.launch is not None and following.launch[1] <= gap[0]:
            yield "other_kernels", gap  # The kernel was in the queue: the GPU needs this time to start it.
            continue
        for part in intersect([gap], optimizer):
            yield ("optimizer" if part[1] - part[0] >= LONG_GAP_S else "launch_idle"), part
        for part in subtract([gap], optimizer):
            yield ("host" if part[1] - part[0] >= LONG_GAP_S else "launch_idle"), part


def _overlaps(when: Interval, window: Interval) -> bool:
    return when[0] < window[1] and when[1] > window[0]


def _is_inside(kernel: Kernel, disjoint: Sequence[Interval]) -> bool:
    """Return whether a kernel was launched in one of some sorted, disjoint intervals."""
    if kernel.launch is None:
        return False
    position = bisect_right(disjoint, (kernel.launch[0], float("inf"))) - 1
    return position >= 0 and kernel.launch[0] < disjoint[position][1]
