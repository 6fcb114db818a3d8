"""The trace of one optimizer step of one worker, and its replay on the model of the allocator.

A trace has the allocations and frees of the step, predicted without running it. Its replay has the peaks, what they are
made of, and the curve over the step.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from distexp.measure.memory import step_parts
from distexp.measure.memory.step_parts import MIN_BLOCK, round_size
from distexp.runs import step_files
from distexp.system.units import MIB

# Model of PyTorch's caching allocator: how much GPU memory it reserves for a sequence of allocations.
#
# It follows ``c10/cuda/CUDACachingAllocator.cpp`` with the default settings. Sizes are rounded to 512 bytes. Blocks
# of at most 1 MiB come from segments of 2 MiB, blocks below 10 MiB from segments of 20 MiB, and larger blocks from
# their own segments, rounded to 2 MiB. A free block is chosen by best fit, and merged with its neighbors. A stream
# never reuses the blocks of another one. Of free blocks of one size the lowest address is used, so the addresses of
# segments matter.

SMALL_SIZE = MIB  # largest block of the small pool
ADDRESS_RANGE = 32 * MIB  # multiple in which the driver takes addresses from the operating system, as seen on H200s
HIGHEST_ADDRESS = 2**47  # end of the addresses of a process on Linux


class OutOfMemoryError(Exception):
    """An allocation that does not fit, even after the allocator released its free segments."""


@dataclass(eq=False)
class Block:
    """A piece of a segment. Its neighbors in the segment form a linked list."""

    size: int
    pool: Pool = field(repr=False)
    address: int
    used: bool = False
    before: Block | None = None
    after: Block | None = None

    @property
    def key(self) -> tuple[int, int]:
        """Size, then address: the order of the free lists."""
        return self.size, self.address


@dataclass
class Pool:
    """Free blocks of one pool, sorted by size."""

    small: bool
    keys: list[tuple[int, int]] = field(default_factory=list)
    blocks: dict[tuple[int, int], Block] = field(default_factory=dict)

    def add(self, block: Block) -> None:
        """Add a free block."""
        insort(self.keys, block.key)
        self.blocks[block.key] = block

    def remove(self, block: Block) -> None:
        """Remove a free block."""
        del self.keys[bisect_left(self.keys, block.key)]
        del self.blocks[block.key]

    def take(self, size: int) -> Block | None:
        """Remove and return the smallest free block of at least a size; None if all are smaller."""
        index = bisect_left(self.keys, (size, -1))
        return self.blocks.pop(self.keys.pop(index)) if index < len(self.keys) else None


@dataclass
class Addresses:
    """Addresses of segments, as the driver and Linux choose them.

    A new range is below all earlier ones, because Linux maps memory from the top down. A segment takes the start of its
    range. A later segment takes the rest of the newest range with enough room. Gaps between other mappings of the
    process are not modeled.
    """

    lowest: int = HIGHEST_ADDRESS  # start of the newest range
    rests: list[tuple[int, int]] = field(default_factory=list)  # start and size of what is left of each range

    def take(self, size: int) -> int:
        """Return the address of a new segment."""
        for index in reversed(range(len(self.rests))):
            start, left = self.rests[index]
            if left >= size:
                self.rests[index] = start + size, left - size
                return start
        length = _round_up(size, ADDRESS_RANGE)
        self.lowest -= length
        self.rests.append((self.lowest + size, length - size))
        return self.lowest


class CachingAllocator:
    """Bytes that the allocator of one GPU holds: in use after rounding, and reserved, which are all segments."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit  # most bytes to reserve; None for no limit
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self.retries = 0  # how often free segments were released to make room
        self._pools: dict[tuple[str, bool], Pool] = {}
        self._addresses = Addresses()

    def allocate(self, size: int, stream: str = "") -> Block:
        """Allocate memory for a stream. Raise OutOfMemoryError if the limit is too low."""
        rounded = round_size(size)
        small = rounded <= SMALL_SIZE
        pool = self._pools.setdefault((stream, small), Pool(small))
        block = pool.take(rounded) or self._new_segment(rounded, pool)
        self._split(block, rounded)
        block.used = True
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Free a block, and merge it with its free neighbors."""
        self.allocated -= block.size
        block.used = False
        # A merged neighbor leaves the free list, because its size changes. It is not used again.
        before, after = block.before, block.after
        if before is not None and not before.used:
            block.pool.remove(before)
            block.address, block.size, block.before = before.address, block.size + before.size, before.before
            if block.before is not None:
                block.before.after = block
        if after is not None and not after.used:
            block.pool.remove(after)
            block.size, block.after = block.size + after.size, after.after
            if block.after is not None:
                block.after.before = block
        block.pool.add(block)

    def _new_segment(self, size: int, pool: Pool) -> Block:
        wanted = segment_size(size)
        if self.limit is not None and self.reserved + wanted > self.limit:
            # As in torch: whole free segments go back to the driver first. Parts of segments cannot.
            self.retries += 1
            self.release_free_segments()
            if self.reserved + wanted > self.limit:
                raise OutOfMemoryError
        self.reserved += wanted
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return Block(wanted, pool, self._addresses.take(wanted))

    def release_free_segments(self) -> None:
        """Return all segments without a used block to the GPU."""
        for pool in self._pools.values():
            for block in list(pool.blocks.values()):
                if block.before is None and block.after is None:  # It is the whole segment.
                    pool.remove(block)
                    self.reserved -= block.size

    def _split(self, block: Block, size: int) -> None:
        """Return the rest of a block to its pool, if it is large enough to be used."""
        rest = block.size - size
        if rest < MIN_BLOCK if block.pool.small else rest <= SMALL_SIZE:
            return
        remainder = Block(rest, block.pool, block.address + size)
        remainder.before, remainder.after = block, block.after
        if block.after is not None:
            block.after.before = remainder
        block.after, block.size = remainder, size
        block.pool.add(remainder)


def segment_size(size: int) -> int:
    """Return the size of a new segment for a block."""
    if size <= SMALL_SIZE:
        return 2 * MIB
    return 20 * MIB if size < 10 * MIB else _round_up(size, 2 * MIB)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


PARTS = (*step_parts.PARTS, "batch")
"""What a block of memory is for.

- activations: tensors that are kept from the forward pass for the backward pass, also 16-bit copies of weights;
- logits: tensors with the vocabulary as last axis, in both passes;
- communication: parameters that FSDP gathered, and the buffers of collectives;
- temporaries: everything else, for example the gradients of activations, and the workspaces of cuBLAS.
"""

PHASES = ("setup", *step_files.PHASES, "evaluation")
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
    exchanged: float = 0.0  # bytes that workers with shared layers, tokens, experts or blocks exchange in the passes


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
    tied_parameters: int = 0  # of the output head, if it is the embedding
    trained_share: float = 1.0  # share of them that is trained
    other_ranks: tuple[int, ...] = ()  # whose peak may be higher


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
