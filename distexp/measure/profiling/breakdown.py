"""Partition of the profiled steps of one rank into what the time went to.

Each instant belongs to exactly one part, so the parts add up to the step. On a GPU, kernels come first, then
collectives, then copies. The rest is idle time of the GPU, which is divided by what the CPU did. On a CPU, operators of
the training thread take the place of kernels.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from distexp.measure.profiling.chrome_trace import COPY, MATMUL, OTHER_KERNEL, Trace, TraceCollective
from distexp.measure.profiling.intervals import Interval, clip, intersect, merge, partition, subtract, total_length
from distexp.runs.metrics import HIDDEN, PARTS

LONG_GAP_S = 1e-3  # A longer idle time without a launch is work of the CPU. A shorter one is the time of a launch.


@dataclass(frozen=True)
class StepParts:
    """The parts of one step, as sorted, disjoint intervals in seconds."""

    window: Interval
    parts: dict[str, list[Interval]]
    hidden_communication_s: float
    optimizer_idle_s: float  # inside the part optimizer, without work for the GPU
    launches: int | None  # calls that launched kernels; None on the CPU
    has_stages: bool = False

    @property
    def duration(self) -> float:
        """Return the duration in seconds."""
        return self.window[1] - self.window[0]

    def to_json(self, rank: int, *, on_gpu: bool) -> dict[str, Any]:
        """Return the entry of ``metrics.step_breakdown``. Without a GPU nothing is known about launches."""
        return {
            "rank": rank,
            "step_ms": 1000 * self.duration,
            **{f"{name}_ms": 1000 * total_length(self.parts[name]) for name in PARTS},
            "optimizer_idle_ms": 1000 * self.optimizer_idle_s,
            **({} if on_gpu else {"launch_idle_ms": None, "optimizer_idle_ms": None}),
            **({} if self.has_stages else {"bubble_ms": None}),
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
    return list(pairwise([*accumulate(edges[:-1], max), last]))


NO_STAGES: Mapping[str, str] = {}
BUBBLE = {**dict.fromkeys(("send", "recv", "send_recv"), "bubble"), "waiting": "bubble"}
"""Parts of the kinds of communication between the stages of a pipeline, which no other communication has, and of the
waiting if all ranks are stages of one pipeline. A stage has nothing to compute while it waits for another one."""


def split_step(
    trace: Trace, window: Interval, collectives: Sequence[Transfer], stages: Mapping[str, str] = NO_STAGES
) -> StepParts:
    """Return the parts of one step of a rank. ``stages`` is ``BUBBLE``, or a part of it, in a pipeline."""
    running = [one for one in collectives if _overlaps((one.wait[0], one.transfer[1]), window)]
    communication = list(_communication_layers(running, stages))
    layers = (_gpu_layers if trace.on_gpu else _cpu_layers)(trace, window, communication)
    spans, left = partition(window, layers)
    idle = list(_idle_spans(trace, left)) if trace.on_gpu else [(interval, "host") for interval in left]
    spans += idle
    merged = {name: merge(interval for interval, label in spans if label == name) for name in PARTS}
    busy = total_length(merge(clip((when for one in running for when in (one.wait, one.transfer)), window)))
    exposed = sum(total_length(merged[name]) for name in ("exposed_communication", "waiting", "bubble"))
    launched = [one for one in trace.kernels if one.category != COPY and window[0] <= one.when[0] < window[1]]
    launches = len({one.launch or one.when for one in launched})  # A CUDA graph is one.
    hidden, optimizer = max(0.0, busy - exposed), [interval for interval, label in idle if label == "optimizer"]
    launched_of_gpu = launches if trace.on_gpu else None
    return StepParts(window, merged, hidden, total_length(optimizer), launched_of_gpu, bool(stages))


Layer = tuple[str, list[Interval]]  # a part with its intervals, for ``partition``
Layers = Iterator[Layer]


def _gpu_layers(trace: Trace, window: Interval, communication: Sequence[Layer]) -> Layers:
    optimizer = merge(trace.optimizer)
    kernels: dict[str, list[Interval]] = {MATMUL: [], OTHER_KERNEL: [], COPY: [], "optimizer": [], "optimizer copy": []}
    for kernel in trace.kernels:
        if not _overlaps(kernel.when, window):
            continue
        category, launch = kernel.category, kernel.launch[0] if kernel.launch is not None else float("-inf")
        position = bisect_right(optimizer, (launch, float("inf"))) - 1
        if position >= 0 and launch < optimizer[position][1]:  # launched by the optimizer
            category = "optimizer copy" if category == COPY else "optimizer"
        kernels[category].append(kernel.when)
    yield "matmul", kernels[MATMUL]
    yield "other_kernels", kernels[OTHER_KERNEL]
    yield "optimizer", kernels["optimizer"]
    yield from communication
    yield "optimizer", kernels["optimizer copy"]
    yield "other_kernels", kernels[COPY]


def _cpu_layers(trace: Trace, window: Interval, communication: Sequence[Layer]) -> Layers:
    optimizer = merge(clip(trace.optimizer, window))
    operators = {name: merge(clip(trace.operators[name], window)) for name in (MATMUL, OTHER_KERNEL)}
    yield "data_wait", trace.data
    yield "optimizer", intersect(merge([*operators[MATMUL], *operators[OTHER_KERNEL]]), optimizer)
    yield "matmul", operators[MATMUL]
    yield "other_kernels", operators[OTHER_KERNEL]
    yield from communication
    yield "optimizer", optimizer


def _communication_layers(collectives: Sequence[Transfer], stages: Mapping[str, str]) -> Layers:
    """Yield the transfers, then the waiting: an instant in which one collective transfers is no waiting."""
    yield "exposed_communication", [one.transfer for one in collectives if one.kind not in stages]
    yield "bubble", [one.transfer for one in collectives if one.kind in stages]
    yield stages.get("waiting", "waiting"), [one.wait for one in collectives]


def _idle_spans(trace: Trace, idle: Sequence[Interval]) -> Iterator[tuple[Interval, str]]:
    """Yield each interval in which the GPU was idle, with its part of the step."""
    data, optimizer = merge(trace.data), merge(trace.optimizer)
    yield from ((interval, "data_wait") for interval in intersect(idle, data))
    events = sorted(trace.device_events, key=lambda event: event.when[0])
    starts = [event.when[0] for event in events]
    for gap in subtract(idle, data):
        position = bisect_right(starts, gap[0])
        launch = events[position].launch if position < len(events) else None
        if launch is not None and launch[1] <= gap[0]:
            yield gap, "other_kernels"  # The kernel was in the queue: the GPU needs this time to start it.
            continue
        for cause, parts in (("optimizer", intersect([gap], optimizer)), ("host", subtract([gap], optimizer))):
            yield from ((part, cause if part[1] - part[0] >= LONG_GAP_S else "launch_idle") for part in parts)


def _overlaps(when: Interval, window: Interval) -> bool:
    return when[0] < window[1] and when[1] > window[0]


SLOWED = ("launch_idle_ms", "host_ms", "waiting_ms", "bubble_ms")
"""Parts that grow because the profiler slows down the CPU."""
OPTIMIZER, OPTIMIZER_IDLE = "optimizer_ms", "optimizer_idle_ms"  # The second is inside the first, and grows too.
DATA_WAIT = "data_wait_ms"  # part that grows too, because the CPU collates and copies batches
SIMILAR = 1.05  # largest ratio of the sizes of two steps whose kernels take equally long


def have_other_sizes(steps: Sequence[tuple[int, ...]]) -> bool:
    """Return whether the kernels of some steps take longer than those of others, by the sizes of their batches."""
    return any(max(sizes) > SIMILAR * min(sizes) for sizes in zip(*steps, strict=True))


def remove_overhead(
    entry: dict[str, Any], median_s: float, *, data_wait_s: float = 0.0, sizes_differ: bool = False
) -> dict[str, Any]:
    """Return an entry of ``metrics.step_breakdown`` for a step that was not profiled.

    On a GPU, kernels and transfers are as long as without the profiler. So the parts in ``SLOWED``, and the idle time
    in the optimizer, lose what the profiled step takes longer than the median one, in proportion to their size. If they
    are too small, ``DATA_WAIT`` loses the rest, down to ``data_wait_s``, its median in these steps. Nothing is removed
    if the batches of the steps have different sizes: the profiled step may then be longer because it has more work.

    On a CPU the profiler slows down all parts, and other programs slow down any step. So all parts are scaled: they
    have the shares of the profiled step, and add up to the median one.
    """
    if entry["launch_idle_ms"] is None:
        return without_slivers(_scale(entry, 1000 * median_s))
    idle_ms = entry.get(OPTIMIZER_IDLE) or 0.0
    slowed = {name: entry[name] for name in SLOWED if entry.get(name) is not None}
    profiled_ms, slowed_ms = entry["step_ms"], idle_ms + sum(slowed.values())
    if sizes_differ:
        return without_slivers({**entry, "profiled_step_ms": profiled_ms, "includes_overhead": True})
    overhead_ms = max(0.0, profiled_ms - 1000 * median_s)
    removed_ms = min(overhead_ms, slowed_ms)
    kept = 1 - removed_ms / slowed_ms if slowed_ms else 1.0
    from_data_ms = min(overhead_ms - removed_ms, max(0.0, entry[DATA_WAIT] - 1000 * data_wait_s))
    shorter = {name: time * kept for name, time in slowed.items()} | {DATA_WAIT: entry[DATA_WAIT] - from_data_ms}
    shorter |= {OPTIMIZER: entry[OPTIMIZER] - idle_ms * (1 - kept), OPTIMIZER_IDLE: idle_ms * kept}
    times = {"step_ms": profiled_ms - removed_ms - from_data_ms, "profiled_step_ms": profiled_ms}
    return without_slivers({**entry, **shorter, **times, "includes_overhead": False})


SLIVER_MS = 1e-6
"""A nanosecond, the unit of a trace. Shorter times are rounding errors of sums."""


def without_slivers(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an entry whose rounding errors are 0. A record with a shorter time is refused."""
    return {name: 0.0 if type(value) is float and abs(value) < SLIVER_MS else value for name, value in entry.items()}


def _scale(entry: dict[str, Any], median_ms: float) -> dict[str, Any]:
    """Return an entry whose parts add up to a median step. They still have the shares of the profiled step."""
    profiled_ms = entry["step_ms"]
    # The time without a core is inside the parts of a CPU, so it is scaled with them.
    keys = (*(f"{name}_ms" for name in (*PARTS, HIDDEN)), "without_core_ms")
    scaled = {key: entry[key] * median_ms / profiled_ms for key in keys if entry.get(key) is not None}
    return {**entry, **scaled, "step_ms": median_ms, "profiled_step_ms": profiled_ms, "includes_overhead": True}


# Waiting for the slowest rank in collectives.
# A collective ends on all ranks at the same time. So the rank with the shortest duration started last, and the others
# waited for it. No clock is compared between machines, only durations.
# The profiler does not record the process group of gloo's collectives. So nothing is known about the waiting if such
# ranks are in several groups, as with ``hybrid_shard``.

Key = tuple[str, str]  # kind of a collective, and the ranks of its process group; empty: unknown
Durations = Mapping[Key, Sequence[float]]  # seconds of a rank's collectives, in the order of their starts

# Kinds in which a rank may end before another has started.
ONE_SIDED = ("send_recv", "send", "recv", "broadcast", "reduce", "gather", "scatter")


def durations_of(collectives: Sequence[TraceCollective], *, several_groups: bool = False) -> dict[Key, list[float]]:
    """Return the durations of the collectives in which all ranks wait for each other.

    If the rank is in several process groups, collectives of unknown groups are left out.
    """
    found: dict[Key, list[float]] = {}
    for collective in sorted(collectives, key=lambda collective: collective.when):
        if collective.kind not in ONE_SIDED and (collective.group or not several_groups):
            start, end = collective.when
            found.setdefault((collective.kind, collective.group), []).append(end - start)
    return found


@dataclass(frozen=True, slots=True)
class Transfer:
    """A collective on one rank, divided into waiting and transfer."""

    kind: str
    wait: Interval  # until the slowest rank starts
    transfer: Interval


def split_collectives(collectives: Sequence[TraceCollective], ranks: Sequence[Durations]) -> list[Transfer]:
    """Divide a rank's collectives into waiting and transfer; no waiting if numbers of collectives differ in a group."""
    shortest: dict[Key, list[float]] = {}
    for key in {key for rank in ranks for key in rank}:
        members = [times[key] for times in ranks if key in times]
        if len({len(times) for times in members}) == 1:
            shortest[key] = [min(values) for values in zip(*members, strict=True)]
    positions: dict[Key, int] = {}
    found: list[Transfer] = []
    for collective in sorted(collectives, key=lambda collective: collective.when):
        key = collective.kind, collective.group
        position = positions[key] = positions.get(key, -1) + 1
        durations = shortest.get(key)
        start, end = collective.when
        started_last = start if durations is None else max(start, end - durations[position])
        found.append(Transfer(collective.kind, (start, started_last), (started_last, end)))
    return found
