"""Phases of a step by the time of the CPU, the waits of the CPU, and the collectives of FSDP's hooks."""

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from distexp.measure.profiling.chrome_trace import FSDP_HOOK, Trace
from distexp.measure.profiling.intervals import Interval, clip, merge, total_length
from distexp.measure.slow_rank_watch import SchedulerDelay
from distexp.runs.step_files import BACKWARD, FORWARD, OPTIMIZER, Collective
from distexp.system.torch_internals.collectives import FSDPUnitSize

Place = tuple[str, int]  # phase and number of the micro-batch


@dataclass(frozen=True)
class StepPhases:
    """The phases of a step. The time between a backward pass and the next phase belongs to the next phase."""

    window: Interval  # start and end of the step on the CPU
    backward: tuple[Interval, ...]  # start and end of each backward pass, one for each micro-batch
    optimizer: float  # start of the optimizer

    def place(self, when: float) -> Place:
        """Return the phase and the micro-batch of an instant."""
        last = max(0, len(self.backward) - 1)
        if when >= self.optimizer:
            return OPTIMIZER, last
        number = bisect_right([end for _, end in self.backward], when)
        if number >= len(self.backward):
            return (OPTIMIZER, last) if self.backward else (FORWARD, 0)
        return (BACKWARD if when >= self.backward[number][0] else FORWARD), number

    def edges(self) -> list[float]:
        """Return the times at which a phase starts or ends."""
        return sorted({*self.window, self.optimizer, *(edge for interval in self.backward for edge in interval)})


def find_phases(
    window: Interval,
    backward: Sequence[Interval],
    optimizer: Sequence[Interval],
    *,
    micro_batches: int,
    hooks: Sequence[float] = (),
) -> StepPhases:
    """Return the phases of a step.

    The backward pass consists of many events. The longest gaps between them are the forward passes. ``hooks`` are the
    times of reductions. Those after the last event of a backward pass belong to it.
    """
    inside = sorted(interval for interval in backward if window[0] <= interval[0] < window[1])
    update = min((start for start, _ in optimizer if window[0] <= start < window[1]), default=window[1])
    passes = _split_at_gaps([interval for interval in inside if interval[0] < update], micro_batches)
    nexts = [*(start for start, _ in passes[1:]), update]
    # A hook right at the end of a pass belongs to it, so the pass ends a nanosecond later.
    pairs = zip(passes, nexts, strict=False)
    passes = [(a, max([b, *(hook + 1e-9 for hook in hooks if b <= hook < limit)])) for (a, b), limit in pairs]
    return StepPhases(window, tuple(passes), max(update, passes[-1][1]) if passes else update)


def _split_at_gaps(events: Sequence[Interval], count: int) -> list[Interval]:
    """Return start and end of some groups of sorted events, which the longest gaps separate."""
    ends = list(accumulate((end for _, end in events), max))
    gaps = [(events[i][0] - ends[i - 1], i) for i in range(1, len(events))]
    starts = sorted(i for gap, i in sorted(gaps)[::-1][: max(0, count - 1)] if gap > 0)
    edges = [0, *starts, len(events)]
    return [(events[a][0], ends[b - 1]) for a, b in pairwise(edges) if b > a]


LONG_LAUNCH_S = 200e-6  # a launch that takes longer waits for a free place in the queue of the GPU


def waits_for_gpu(trace: Trace) -> list[Interval]:
    """Return when the CPU waits for the GPU, or for a free place in its queue."""
    launches = (event.launch for event in trace.device_events if event.launch is not None)
    blocked = [(start + LONG_LAUNCH_S, end) for start, end in launches if end - start > LONG_LAUNCH_S]
    return [*trace.synchronizations, *blocked]


def cpu_busy_ms(trace: Trace, position: int) -> float | None:
    """Return how long the CPU does not wait for the GPU in a step; None without a GPU."""
    if not trace.on_gpu:
        return None
    start, end = trace.steps[position]
    return 1000 * (end - start - total_length(merge(clip(waits_for_gpu(trace), (start, end)))))


class CoreWaits:
    """Time without a core of the training thread in each profiled step. On a GPU, this time is no part of a step."""

    def __init__(self, *, enabled: bool) -> None:
        self._scheduler = SchedulerDelay() if enabled else None
        self._started_s = 0.0
        self._waits_s: list[float] = []

    def start_step(self) -> None:
        """Start to measure a step."""
        if self._scheduler is not None:
            self._started_s = self._scheduler.read_s()

    def end_step(self) -> None:
        """Keep the time of the step that has ended."""
        if self._scheduler is not None:
            self._waits_s.append(self._scheduler.read_s() - self._started_s)

    def milliseconds(self, position: int) -> float | None:
        """Return the time of a profiled step by its number; None if it is not known."""
        if self._scheduler is None or not self._scheduler.is_readable or position >= len(self._waits_s):
            return None
        return 1000 * self._waits_s[position]


# The collectives of FSDP from the annotations of its hooks, which a profile has with any number of workers.
# With one worker FSDP gathers and reduces nothing. Then its hooks show where it would.

# FSDP::pre_forward (layers.0), FSDP::backward_prefetch for layers.1, FSDP::pre_forward of the root.
HOOK = re.compile(rf"{FSDP_HOOK}(\w+)(?: \(([^)]*)\)| for ([^\[]*?))?(?: \[.*\])?$")

Launched = tuple[float, Collective]  # time of the launch on the CPU, and the collective


def collectives_of_hooks(
    calls: Sequence[tuple[str, Interval]], units: Mapping[str, FSDPUnitSize], phases: StepPhases
) -> list[Launched]:
    """Return the collectives of a step in the order of time. Units are known by name; that of the root is empty."""
    first, last = phases.window
    hooks = sorted((when[0], name) for name, when in calls if name.startswith(FSDP_HOOK) and first <= when[0] < last)
    found = [(when, m[1], m[2] or m[3] or "") for when, name in hooks if (m := HOOK.match(name))]
    parsed = [hook for hook in found if hook[2] in units]
    known = [(when, hook, units[unit]) for when, hook, unit in parsed]
    reduced = [
        (when, "reduce_scatter" if unit.shards else "all_reduce", unit.reduced_bytes)
        for when, hook, unit in known
        if hook == "post_backward_reduce"
    ]
    if any(hook == "all_gather" for _, hook, _ in parsed):  # several workers
        gathered = [(t, "all_gather", unit.gathered_bytes) for t, hook, unit in known if hook == "all_gather"]
    else:
        needed = _gathers([hook for hook in parsed if units[hook[2]].shards], units, phases)
        gathered = [(when, "all_gather", size) for when, size in needed]
    ordered = sorted([*gathered, *reduced], key=lambda timed: timed[0])
    return [(when, Collective(kind, size, 1, "shard", FORWARD, 0)) for when, kind, size in ordered]


def _gathers(
    hooks: Sequence[tuple[float, str, str]], units: Mapping[str, FSDPUnitSize], phases: StepPhases
) -> list[tuple[float, int]]:
    """Return where FSDP would gather so many bytes: in the first hook that needs the missing weights of a unit."""
    present: set[str] = set()
    found = []
    keeps = not any(unit.reshards_after_forward for name, unit in units.items() if name)
    last = phases.backward[-1][0] if phases.backward else phases.window[0]  # start of the last backward pass

    def frees(hook: str, unit: FSDPUnitSize, when: float) -> bool:
        after_forward = hook == "post_forward" and unit.reshards_after_forward
        return after_forward or (hook == "post_backward_reshard" and (not keeps or when >= last))

    for when, hook, unit in hooks:
        if hook in ("pre_forward", "pre_backward", "backward_prefetch") and unit not in present:
            present.add(unit)
            found.append((when, units[unit].gathered_bytes))
        elif frees(hook, units[unit], when):
            present.discard(unit)
    return found
