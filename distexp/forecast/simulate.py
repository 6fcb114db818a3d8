"""Simulation of a training step with a clock for the CPU, one for computation, and one for communication.

The CPU launches the items in order. The device executes the segments one after the other. At the same time it executes
the collectives, also one after the other. A segment waits for collectives whose results it needs. A collective waits
for segments whose results it sends. Steps are repeated until their duration is constant, because the CPU may run ahead.
"""

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
    """Clocks that the items of a step advance, and the parts of this step."""

    on_gpu: bool
    scales: Scales
    host: float = 0.0
    device: float = 0.0
    network: float = 0.0
    parts: SimulatedStep = field(default_factory=SimulatedStep)

    def run_step(self, items: Sequence[Item], durations: Sequence[float], awaited: dict[int, list[int]]) -> None:
        """Run one step."""
        ends: dict[int, float] = {}

        def ready_at(position: int) -> float:
            return max((ends[collective] for collective in awaited.get(position, ())), default=0.0)

        for position, item in enumerate(items):
            if isinstance(item, Collective):
                ends[position] = self._run_collective(item, durations[position])
            elif self.on_gpu:
                self._run_on_device(item, ready_at(position))
            else:
                ready, host_s = ready_at(position), self.scales.host * item.host_s
                self.parts.exposed_s += max(0.0, ready - self.host)
                self.host = max(self.host, ready) + host_s
                self.parts.compute_s += host_s
        last = ready_at(len(items))
        self.parts.exposed_s += max(0.0, last - (self.device if self.on_gpu else self.host))
        if self.on_gpu:
            self.device = max(self.device, last)
        else:
            self.host = max(self.host, last)

    def _run_collective(self, item: Collective, seconds: float) -> float:
        """Launch a collective and return its end."""
        self.host += self.scales.host * item.host_s
        if not self.on_gpu:
            self.parts.compute_s += self.scales.host * item.host_s
        results = self.device if item.after_compute else 0.0
        self.network = max(self.network, self.host, results) + seconds
        self.parts.communication_s += seconds
        return self.network

    def _run_on_device(self, item: Segment, ready: float) -> None:
        """Launch a segment, and execute it on the device when its collectives have ended."""
        duration = self.scales.device * item.device_s
        unblocked = max(self.device + duration, self.host + scaled_tail(item, self.scales))
        self.device = max(unblocked, ready + duration)
        self.parts.compute_s += duration
        self.parts.exposed_s += self.device - unblocked
        self.host += self.scales.host * item.host_s
        if item.waits:
            self.host = max(self.host, self.device)


def simulate(
    items: Sequence[Item], durations: Sequence[float], *, on_gpu: bool, scales: Scales | None = None
) -> SimulatedStep:
    """Return the step in the steady state. Each item that is a collective has a duration; those of others are ignored.

    Without a GPU, the CPU executes the segments while it launches them. The scales are for the times of the segments.
    """
    scales = scales or Scales()
    clocks = _Clocks(on_gpu, scales if on_gpu else Scales(scales.host, 0.0))
    awaited, previous = dependencies(items), SimulatedStep()
    for _ in range(MAX_STEPS):
        before = max(clocks.host, clocks.device)
        clocks.parts = now = SimulatedStep()
        clocks.run_step(items, durations, awaited)
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
