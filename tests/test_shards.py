"""Which rank sees which sample: each once, in the same global batches for any number of ranks."""

from __future__ import annotations

from collections import Counter

import pytest

from distexp.data.shards import ShardedBatches, Share


def steps_of(length: int, world: int, micro: int, accumulation: int, epoch: int = 0) -> list[list[int]]:
    """The positions of each global batch, all ranks together; filling ones negative."""
    ranks = []
    for rank in range(world):
        batches = ShardedBatches(length, Share(rank, world, micro, accumulation), seed=7, shuffle=True)
        batches.epoch = epoch
        rows = list(batches)
        assert len(rows) == len(batches)
        assert all(len(row) == micro for row in rows)
        ranks.append(rows)
    return [
        [index for rows in ranks for row in rows[at : at + accumulation] for index in row]
        for at in range(0, len(ranks[0]), accumulation)
    ]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("length", [1, 5, 24, 100])
def test_every_sample_counts_once(world: int, length: int) -> None:
    seen = Counter(index for step in steps_of(length, world, 2, 2) for index in step if index >= 0)
    assert seen == Counter(range(length))


@pytest.mark.parametrize("shape", [(2, 4, 3), (3, 4, 2), (4, 3, 2), (6, 4, 1), (24, 1, 1)])
def test_a_global_batch_is_the_same_for_any_number_of_ranks(shape: tuple[int, int, int]) -> None:
    def counted(world: int, micro: int, accumulation: int) -> list[set[int]]:
        return [{i for i in step if i >= 0} for step in steps_of(113, world, micro, accumulation)]

    assert counted(*shape) == counted(1, 4, 6)


def test_epochs_are_shuffled_apart_and_repeatably() -> None:
    assert steps_of(50, 2, 2, 2, epoch=0) != steps_of(50, 2, 2, 2, epoch=1)
    assert steps_of(50, 2, 2, 2, epoch=1) == steps_of(50, 2, 2, 2, epoch=1)
