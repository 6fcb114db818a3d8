"""Model of PyTorch's caching allocator: how much GPU memory it reserves for a sequence of allocations.

It follows ``c10/cuda/CUDACachingAllocator.cpp`` with the default settings. Sizes are rounded to 512 bytes. Blocks of at
most 1 MiB come from segments of 2 MiB, blocks below 10 MiB from segments of 20 MiB, and larger blocks from their own
segments, rounded to 2 MiB. A free block is chosen by best fit, and merged with its neighbors. A stream never reuses the
blocks of another one. Of free blocks of one size the lowest address is used, so the addresses of segments matter.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from distexp.system.units import MIB

MIN_BLOCK = 512
SMALL_SIZE = MIB  # largest block of the small pool
SMALL_SEGMENT = 2 * MIB
MIN_LARGE_ALLOC = 10 * MIB
LARGE_SEGMENT = 20 * MIB
ROUND_LARGE = 2 * MIB
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


def round_size(size: int) -> int:
    """Return the size of the block for an allocation."""
    return max(MIN_BLOCK, _round_up(size, MIN_BLOCK))


def segment_size(size: int) -> int:
    """Return the size of a new segment for a block."""
    if size <= SMALL_SIZE:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < MIN_LARGE_ALLOC else _round_up(size, ROUND_LARGE)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
