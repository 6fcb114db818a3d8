"""The trace of one optimizer step of one worker, and its replay on the model of the allocator.

A trace has the allocations and frees of the step, predicted without running it. Its replay has the peaks, what they are
made of, and the curve over the step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from distexp.plan.allocator import Block, CachingAllocator, OutOfMemoryError
from distexp.system.units import MIB

PARTS = (
    "parameters",
    "gradients",
    "optimizer_states",
    "activations",
    "logits",
    "communication",
    "temporaries",
    "batch",
)
"""What a block of memory is for.

- activations: tensors that are kept from the forward pass for the backward pass, also 16-bit copies of weights;
- logits: tensors with the vocabulary as last axis, in both passes;
- communication: parameters that FSDP gathered, and the buffers of collectives;
- temporaries: everything else, for example the gradients of activations, and the workspaces of cuBLAS.
"""

PHASES = ("setup", "forward", "backward", "optimizer", "evaluation")
"""Parts of a step, and the evaluation. ``setup`` is what is in memory before the step."""

FORWARD_WORKSPACE, BACKWARD_WORKSPACE, EMPTY_CACHE = -1, -2, -3
"""Reserved numbers of blocks: the workspaces of cuBLAS, one for the thread of each pass, and an event of no bytes:
the allocator returns its free segments, as ``torch.cuda.empty_cache`` does."""


class PlanError(Exception):
    """A configuration whose memory cannot be predicted; the message has the reason and a hint."""


@dataclass(frozen=True)
class Event:
    """One allocation, or its free. The allocator of torch reuses memory only in the stream that allocated it."""

    bytes: int  # requested size; negative for a free. Allocators round it up.
    block: int  # number of the allocation, from 0, or a reserved one. Its free has the same.
    part: str  # one of PARTS
    phase: str  # one of PHASES, in which the event happens
    device: str  # ``gpu`` or ``host``
    stream: str = ""  # name of the CUDA stream of the allocation; empty for that of the computation

    @property
    def is_allocation(self) -> bool:
        """Return whether the event allocates its block, and does not free it or the cache."""
        return self.bytes >= 0 and self.block != EMPTY_CACHE


@dataclass(frozen=True)
class StepWork:
    """What one optimizer step of one worker computes."""

    flops: float  # floating point operations of matrix products, convolutions and attention
    operations: int  # kernels that are launched
    optimizer_operations: int  # those of them that do not depend on the number of micro-batches
    written: float  # bytes of all tensors that are allocated


@dataclass(frozen=True)
class StepTrace:
    """The events of one optimizer step of one worker, in order."""

    events: tuple[Event, ...]  # what is in memory before the step, as phase ``setup``, then the step
    seconds: float = 0.0  # of the prediction
    notes: tuple[str, ...] = ()  # what was assumed
    history: tuple[Event, ...] = ()  # before the step: the construction of the model (``setup``), and the first step
    evaluation: tuple[Event, ...] = ()  # a batch of the evaluation after the step
    work: StepWork | None = None  # what the step computes; None if it was not counted
    parameters: int = 0  # number of parameters of the whole model; a shared weight counts once


CURVE_POINTS = 160
LIMIT_ACCURACY = 0.01  # relative accuracy of the smallest memory in which a step runs


@dataclass(frozen=True)
class Point:
    """Memory in use after an event, in bytes by part."""

    phase: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Replay:
    """What a step needs on one GPU, in bytes."""

    peak_allocated: int
    peak_reserved: int
    required: int  # smallest limit of the reserved memory in which the step runs
    peak: Point  # parts at the peak of the allocated memory
    curve: tuple[Point, ...]  # parts through the step. Each point is the largest of an interval.


@dataclass
class _Memory:
    """The memory of a GPU during a replay: the allocator, and what is in use by part."""

    allocator: CachingAllocator
    used: Counter[str] = field(default_factory=Counter)
    blocks: dict[int, tuple[Block, str]] = field(default_factory=dict)

    def apply(self, event: Event) -> None:
        if event.block == EMPTY_CACHE:
            self.allocator.release_free_segments()
        elif event.is_allocation:
            block = self.allocator.allocate(event.bytes, event.stream)
            self.blocks[event.block] = block, event.part
            self.used[event.part] += block.size
        else:
            block, part = self.blocks.pop(event.block)
            self.used[part] -= block.size
            self.allocator.free(block)

    def point(self, event: Event) -> Point:
        return Point(event.phase, {part: self.used[part] for part in PARTS})


def replay(events: Sequence[Event], history: Sequence[Event] = (), evaluation: Sequence[Event] = ()) -> Replay:
    """Return the peaks of the events on the GPU, without a limit of its memory.

    The events are a step, after what is in memory before it as phase ``setup``. The history is how that memory was
    allocated: the construction of the model, and the first step. It decides which free blocks the allocator has.
    Without it the allocations of ``setup`` are made in their order. The evaluation follows the step.
    """
    on_gpu, history, evaluation = (
        [event for event in part if event.device == "gpu"] for part in (events, history, evaluation)
    )
    before = history or [event for event in on_gpu if event.phase == "setup"]
    step = [event for event in on_gpu if event.phase != "setup"]
    # A second step finds other free blocks than the first, so both are replayed if one follows from the other.
    sequence = [*before, *step, *_following(step, evaluation)]
    memory = _Memory(allocator := CachingAllocator())
    peak, highest = Point("setup", dict.fromkeys(PARTS, 0)), 0
    curve: list[Point] = []
    width = max(1, -(-len(step) // CURVE_POINTS))
    for position, event in enumerate(sequence, -len(before)):
        memory.apply(event)
        if allocator.allocated > highest:
            peak, highest = memory.point(event), allocator.allocated
        if 0 <= position < len(step):
            # A plot of all events would be slow, so each interval has one point: its largest.
            if position % width == 0:
                curve.append(memory.point(event))
            elif allocator.allocated > curve[-1].total:
                curve[-1] = memory.point(event)
    required = _smallest_limit(sequence, allocator.peak_allocated, allocator.peak_reserved)
    return Replay(allocator.peak_allocated, allocator.peak_reserved, required, peak, tuple(curve))


def host_peak(events: Iterable[Event]) -> int:
    """Return the largest number of bytes that the events use on the host."""
    used = peak = 0
    for event in events:
        if event.device == "host":
            used += event.bytes
            peak = max(peak, used)
    return peak


def _following(step: Sequence[Event], evaluation: Sequence[Event]) -> list[Event]:
    """Return the same step once more, if that follows, and the evaluation after it."""
    of_first_step = repeated_blocks(step)
    if of_first_step is None:
        return list(evaluation)
    first = min((event.block for event in step if event.is_allocation), default=0)
    offset = max((event.block for event in step), default=0) + 1
    # Blocks of the second step get new numbers. Those of the first step that it frees keep theirs.
    renewed = {event.block: event.block + offset for event in (*step, *evaluation) if event.block >= first}
    numbers = renewed | of_first_step
    second = [replace(event, block=numbers.get(event.block, event.block)) for event in step]
    return second + [replace(event, block=renewed.get(event.block, event.block)) for event in evaluation]


def repeated_blocks(step: Sequence[Event]) -> dict[int, int] | None:
    """Return the blocks of this step that the next one frees, such as the batch, by those that this one frees."""
    born = {event.block: event.bytes for event in step if event.is_allocation}
    freed = {event.block: -event.bytes for event in step if event.bytes < 0}
    # Blocks of one size are freed in the order of their allocation, so pop() below must take the oldest first.
    kept: dict[int, list[int]] = defaultdict(list)
    for block in reversed([block for block in born if block not in freed]):
        kept[born[block]].append(block)
    older = [block for block in freed if block not in born]
    if sorted(freed[block] for block in older) != sorted(size for size, blocks in kept.items() for _ in blocks):
        return None  # The memory grows or shrinks in each step.
    return {block: kept[freed[block]].pop() for block in older}


def _smallest_limit(events: Sequence[Event], allocated: int, reserved: int) -> int:
    low, high = allocated, reserved
    while high - low > max(LIMIT_ACCURACY * reserved, MIB):
        middle = (low + high) // 2
        memory = _Memory(CachingAllocator(middle))
        try:
            for event in events:
                memory.apply(event)
        except OutOfMemoryError:
            low = middle
        else:
            high = middle
    return high
