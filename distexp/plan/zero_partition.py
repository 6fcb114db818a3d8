"""What a stage of ZeRO keeps on one rank, computed from the shapes of the parameters.

Written after the source of DeepSpeed 0.19.8, ``runtime/zero/stage_1_and_2.py`` and ``stage3.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

ALIGNMENT = 2
"""Elements to which stages 1 and 2 align a partition (``nccl_start_alignment_factor``)."""


@dataclass(frozen=True)
class Partition:
    """The share of one rank of one parameter group, for stages 1 and 2.

    Attributes:
        size: elements of the share, with padding; equal on all ranks.
        owned: for each parameter of the group, how many of its elements are in this share.
    """

    size: int
    owned: tuple[int, ...]


def partition_group(sizes: Sequence[int], world_size: int, rank: int) -> Partition:
    """Return the share of a rank of a group of parameters, which are flattened one after the other."""
    aligned = -(-sum(sizes) // (ALIGNMENT * world_size)) * ALIGNMENT * world_size
    share = aligned // world_size
    first, last = rank * share, (rank + 1) * share
    owned, offset = [], 0
    for size in sizes:
        owned.append(max(0, min(offset + size, last) - max(offset, first)))
        offset += size
    return Partition(share, tuple(owned))


def fullest_rank(groups: Sequence[Sequence[int]], world_size: int) -> int:
    """Return the rank with the most elements in the parameters that its shares overlap.

    A rank keeps the whole gradient of a parameter, even if its share has only a part of it.
    """

    def kept(rank: int) -> int:
        shares = [partition_group(sizes, world_size, rank) for sizes in groups]
        return sum(size for sizes, share in zip(groups, shares, strict=True) for size in _overlapping(sizes, share))

    return max(range(world_size), key=kept)


def _overlapping(sizes: Sequence[int], share: Partition) -> list[int]:
    return [size for size, owned in zip(sizes, share.owned, strict=True) if owned]


@dataclass(frozen=True)
class Slice:
    """Elements of a gradient that one rank keeps."""

    rank: int
    size: int


def cut_into_slices(offset: int, size: int, share: int) -> list[Slice]:
    """Return the slices of a parameter that starts at ``offset`` of its group."""
    ends = [*range((offset // share + 1) * share, offset + size, share), offset + size]
    starts = [offset, *ends[:-1]]
    return [Slice(start // share, end - start) for start, end in zip(starts, ends, strict=True)]


def reduced_at_once(gradients: Sequence[Sequence[Slice]], bucket_size: int) -> list[list[Slice]]:
    """Return the slices of a bucket that are reduced together (``allreduce_and_scatter``).

    Neighbors of one rank are one slice. A reduction ends when it has more elements than a bucket.
    """
    slices = [part for gradient in gradients for part in gradient]
    merged = [Slice(rank, sum(part.size for part in found)) for rank, found in groupby(slices, lambda part: part.rank)]
    reductions: list[list[Slice]] = [[]]
    for merged_slice in merged:
        reductions[-1].append(merged_slice)
        if sum(part.size for part in reductions[-1]) > bucket_size:
            reductions.append([])
    return [slices for slices in reductions if slices]
