"""Simulation of a training step with a clock for the CPU, one for computation, and one for communication.

The CPU launches the items in order. The device executes the segments one after the other. At the same time it executes
the collectives, also one after the other. A segment waits for collectives whose results it needs. A collective waits
for segments whose results it sends. Steps are repeated until their duration is constant, because the CPU may run ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice

from distexp.runs.step_files import NEXT, OPTIMIZER, Collective, Item, Segment

MAX_STEPS = 40  # steps after which the last one counts, even if the duration is not constant
CONSTANT = 1e-6  # relative difference of two durations that are equal


@dataclass(frozen=True)
class Scales:
    """Factors of the times of the profiled step."""

    host: float = 1.0
    device: float = 1.0


@dataclass
class SimulatedStep:
    """Duration of a step and what the device did; times are in seconds.

    The parts ``compute_s``, ``exposed_s`` and ``launch_s`` add up to ``step_s``.
    """

    step_s: float = 0.0
    compute_s: float = 0.0  # time of the segments
    exposed_s: float = 0.0  # time that a segment, or the next step, waits for a collective
    launch_s: float = 0.0  # time that the device waits for the CPU
    communication_s: float = 0.0  # sum of all collectives

    @property
    def hidden_s(self) -> float:
        """Return the communication at the same time as computation."""
        return max(0.0, self.communication_s - self.exposed_s)


@dataclass
class _Clocks:
    host: float = 0.0
    device: float = 0.0
    network: float = 0.0
    parts: SimulatedStep = field(default_factory=SimulatedStep)


def simulate(
    items: Sequence[Item], durations: Sequence[float], *, on_gpu: bool, scales: Scales | None = None
) -> SimulatedStep:
    """Return the step in the steady state. Each item that is a collective has a duration; those of others are ignored.

    Without a GPU, the CPU executes the segments while it launches them. The scales are for the times of the segments.
    """
    scales = scales or Scales()
    awaited = dependencies(items)
    clocks, previous = _Clocks(), SimulatedStep()
    for _ in range(MAX_STEPS):
        before = max(clocks.host, clocks.device)
        clocks.parts = SimulatedStep()
        _run_step(items, durations, awaited, clocks, scales if on_gpu else Scales(scales.host, 0.0), on_gpu=on_gpu)
        now = clocks.parts
        now.step_s = max(clocks.host, clocks.device) - before
        if abs(now.step_s - previous.step_s) <= CONSTANT * now.step_s:
            break
        previous = now
    now.launch_s = max(0.0, now.step_s - now.compute_s - now.exposed_s)
    return now


def dependencies(items: Sequence[Item]) -> dict[int, list[int]]:
    """Return the positions of the collectives that each segment waits for, by the position of the segment.

    The key ``len(items)`` has those that the end of the step waits for, because no segment does.
    """
    found: dict[int, list[int]] = {}
    optimizer = next((i for i, item in enumerate(items) if isinstance(item, Segment) and item.phase == OPTIMIZER), None)
    for position, item in enumerate(items):
        if isinstance(item, Collective):
            after_it = optimizer is not None and optimizer > position
            segment = optimizer if item.awaited == OPTIMIZER and after_it else _next_segment(items, position)
            found.setdefault(len(items) if segment is None else segment, []).append(position)
    return found


def _next_segment(items: Sequence[Item], position: int) -> int | None:
    """Return the segment that waits for a collective: the next one, or a later one if it was launched ahead."""
    one = items[position]
    assert isinstance(one, Collective)
    place = one.kind, one.axis, one.phase, one.micro_batch
    start, left = position, one.ahead if one.awaited == NEXT else 0
    for later in range(position + 1, len(items)):
        other = items[later]
        if left == 0:
            break
        if isinstance(other, Collective) and (other.kind, other.axis, other.phase, other.micro_batch) == place:
            start, left = later, left - 1
    following = (later for later in range(start + 1, len(items)) if isinstance(items[later], Segment))
    return next(islice(following, one.segments_ahead, None), None)


def _run_step(
    items: Sequence[Item],
    durations: Sequence[float],
    awaited: dict[int, list[int]],
    clocks: _Clocks,
    scales: Scales,
    *,
    on_gpu: bool,
) -> None:
    """Run one step, which advances the clocks."""
    ends: dict[int, float] = {}

    def ready_at(position: int) -> float:
        return max((ends[collective] for collective in awaited.get(position, ())), default=0.0)

    for position, item in enumerate(items):
        if isinstance(item, Collective):
            ends[position] = _run_collective(item, durations[position], clocks, scales, on_gpu=on_gpu)
        elif on_gpu:
            _run_on_device(item, ready_at(position), clocks, scales)
        else:
            ready, host_s = ready_at(position), scales.host * item.host_s
            clocks.parts.exposed_s += max(0.0, ready - clocks.host)
            clocks.host = max(clocks.host, ready) + host_s
            clocks.parts.compute_s += host_s
    last = ready_at(len(items))
    clocks.parts.exposed_s += max(0.0, last - (clocks.device if on_gpu else clocks.host))
    if on_gpu:
        clocks.device = max(clocks.device, last)
    else:
        clocks.host = max(clocks.host, last)


def _run_collective(item: Collective, seconds: float, clocks: _Clocks, scales: Scales, *, on_gpu: bool) -> float:
    """Launch a collective and return its end."""
    clocks.host += scales.host * item.host_s
    if not on_gpu:
        clocks.parts.compute_s += scales.host * item.host_s
    results = clocks.device if item.after_compute else 0.0
    clocks.network = max(clocks.network, clocks.host, results) + seconds
    clocks.parts.communication_s += seconds
    return clocks.network


def _run_on_device(item: Segment, ready: float, clocks: _Clocks, scales: Scales) -> None:
    """Launch a segment, and execute it on the device when its collectives have ended."""
    duration = scales.device * item.device_s
    tail = scaled_tail(item, scales)
    unblocked = max(clocks.device + duration, clocks.host + tail)
    end = max(unblocked, ready + duration)
    clocks.parts.compute_s += duration
    clocks.parts.exposed_s += end - unblocked
    clocks.device = end
    clocks.host += scales.host * item.host_s
    if item.waits:
        clocks.host = max(clocks.host, end)


def scaled_tail(item: Segment, scales: Scales) -> float:
    """Return the tail of a segment for other times of the CPU and the device.

    The tail is a maximum over the kernels: launch of the kernel plus all kernels from it on. So it is a convex function
    of the time of the CPU, which three points approximate: none, half, and all of it.
    """
    if scales.device == 0:
        return scales.host * item.host_s
    relative = scales.host / scales.device
    if relative <= 0.5:
        tail = item.device_s + 2 * relative * (item.tail_half_s - item.device_s)
    elif relative <= 1:
        tail = item.tail_half_s + (2 * relative - 1) * (item.tail_s - item.tail_half_s)
    else:
        tail = item.tail_s + (relative - 1) * item.host_s
    return scales.device * tail


def extrapolate(fewer: SimulatedStep, most: SimulatedStep, more: int) -> SimulatedStep:
    """Return a step with some more micro-batches than two others, of which one has a micro-batch more."""
    less, values = asdict(fewer), asdict(most)
    return SimulatedStep(**{name: value + more * max(0.0, value - less[name]) for name, value in values.items()})
