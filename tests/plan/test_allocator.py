"""Tests of the allocator model, with segments and blocks computed by hand from torch's rules."""

from __future__ import annotations

import pytest

from distexp.measure.memory.step_parts import round_size
from distexp.plan.replay import (
    CURVE_POINTS,
    EMPTY_CACHE,
    Addresses,
    CachingAllocator,
    Event,
    OutOfMemoryError,
    host_peak,
    repeated_blocks,
    replay,
    segment_size,
)
from distexp.system.units import MIB


def test_sizes_are_rounded_to_512_bytes() -> None:
    assert [round_size(size) for size in (0, 1, 512, 513, MIB)] == [512, 512, 512, 1024, MIB]


def test_segments_have_the_sizes_of_torch() -> None:
    sizes = {512: 2, MIB: 2, MIB + 512: 20, 10 * MIB - 512: 20, 10 * MIB: 10, 10 * MIB + 512: 12, 33 * MIB: 34}
    assert {size: segment_size(size) // MIB for size in sizes} == sizes


def test_small_blocks_share_a_segment() -> None:
    allocator = CachingAllocator()
    for _ in range(2):
        allocator.allocate(MIB)
    assert (allocator.allocated, allocator.reserved) == (2 * MIB, 2 * MIB)
    allocator.allocate(1)
    assert (allocator.allocated, allocator.reserved) == (2 * MIB + 512, 4 * MIB)


def test_large_block_with_a_rest_of_1_mib_is_not_split() -> None:
    allocator = CachingAllocator()
    allocator.allocate(19 * MIB)  # a segment of 20 MiB, with a rest of 1 MiB
    assert (allocator.allocated, allocator.reserved) == (20 * MIB, 20 * MIB)
    allocator.allocate(19 * MIB - 512)
    assert allocator.allocated == 39 * MIB - 512, "a rest above 1 MiB is split off"
    allocator.allocate(MIB + 512)
    assert allocator.reserved == 40 * MIB, "the rest is used"


def test_best_fit_takes_the_smallest_free_block() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size * MIB) for size in (40, 24, 30)]
    for block in blocks:
        allocator.free(block)
    again = allocator.allocate(24 * MIB)
    assert (again, allocator.reserved) == (blocks[1], 94 * MIB)


def test_free_neighbors_are_merged() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    assert allocator.reserved == 20 * MIB
    for index in (0, 2, 1):
        allocator.free(blocks[index])
    allocator.allocate(15 * MIB)
    assert (allocator.allocated, allocator.reserved) == (20 * MIB, 20 * MIB)


def test_of_equal_blocks_the_one_with_the_lowest_address_is_used() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    other = allocator.allocate(5 * MIB)  # in a second segment
    for block in (other, blocks[3], blocks[1]):
        allocator.free(block)
    assert allocator.allocate(5 * MIB) is blocks[1]


def test_an_emptied_cache_keeps_the_segments_with_a_used_block() -> None:
    events = [
        *(Event(size * MIB, block, "parameters", "setup", "gpu") for block, size in enumerate((40, 5, 5))),
        *(Event(-size * MIB, block, "parameters", "setup", "gpu") for block, size in ((0, 40), (1, 5))),
        Event(0, EMPTY_CACHE, "temporaries", "setup", "gpu"),
        Event(30 * MIB, 3, "parameters", "setup", "gpu"),
        Event(5 * MIB, 4, "parameters", "setup", "gpu"),
    ]
    assert replay(events).peak_reserved == (40 + 20) * MIB
    larger = [*events[:-2], Event(60 * MIB, 3, "parameters", "setup", "gpu")]
    assert replay(larger).peak_reserved == (20 + 60) * MIB


def test_of_equal_segments_the_newest_one_is_used_because_linux_maps_memory_from_the_top_down() -> None:
    allocator = CachingAllocator()
    older, newer = allocator.allocate(7840 * MIB), allocator.allocate(7840 * MIB)
    for block in (newer, older):
        allocator.free(block)
    assert allocator.allocate(490 * MIB) is newer


def test_a_segment_takes_the_rest_of_an_address_range_before_a_new_one() -> None:
    # The addresses of the first segments of a run on an H200, relative to the first one.
    addresses = Addresses()
    first = addresses.take(392 * MIB)
    found = [(addresses.take(size * MIB) - first) // MIB for size in (20, 2, 48, 64, 64, 48, 16)]
    assert found == [392, 412, -64, -128, -192, -256, -208]


def test_fragments_are_not_enough() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    for index in (0, 2):
        allocator.free(blocks[index])
    allocator.allocate(9 * MIB)  # 10 MiB are free in two pieces
    assert (allocator.allocated, allocator.reserved) == (19 * MIB, 40 * MIB)


def test_free_segments_are_released_before_running_out() -> None:
    allocator = CachingAllocator(limit=100 * MIB)
    allocator.free(allocator.allocate(60 * MIB))
    allocator.allocate(80 * MIB)
    assert (allocator.reserved, allocator.peak_reserved, allocator.retries) == (80 * MIB, 80 * MIB, 1)
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(30 * MIB)


def test_streams_do_not_share_blocks() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(30 * MIB, "communication"))
    allocator.allocate(30 * MIB)
    assert allocator.reserved == 60 * MIB


def step(*events: tuple[int, int, str, str]) -> list[Event]:
    """Return events on the GPU from MiB, block, part and phase."""
    return [Event(mib * MIB, block, part, phase, "gpu") for mib, block, part, phase in events]


STEP = step(
    (40, 0, "parameters", "setup"),
    (30, 1, "activations", "forward"),
    (60, 2, "logits", "forward"),
    (-60, 2, "logits", "backward"),
    (40, 3, "gradients", "backward"),
    (-30, 1, "activations", "backward"),
    (80, 4, "temporaries", "optimizer"),
    (-80, 4, "temporaries", "optimizer"),
)


def test_replay_finds_peak_phase_and_parts() -> None:
    # Use: 40, 70, 130, 70, 110 (in the 60 of the logits), 80, 160.
    found = replay(STEP)
    assert found.peak_allocated == 160 * MIB
    assert found.peak.phase == "optimizer"
    assert {part: size // MIB for part, size in found.peak.parts.items() if size} == {
        "parameters": 40, "gradients": 40, "temporaries": 80,
    }  # fmt: skip


def test_replay_reserves_what_fragments_leave() -> None:
    # Segments: 40, 30, 60 (logits, then 40 of gradients), 80. The free 30 can be released, so 180 are enough.
    found = replay(STEP)
    assert found.peak_reserved == 210 * MIB
    assert found.required == pytest.approx(180 * MIB, rel=0.02)
    assert found.required >= 180 * MIB


def test_second_step_uses_the_free_blocks_of_the_first_one() -> None:
    # The second step puts 10 into the block of 10, 11 into that of 12, and so on: it needs no further segment.
    sizes = (12, 11, 10)
    once = [(size, number, "activations", "forward") for number, size in enumerate(sizes)]
    frees = [(-size, number, "activations", "backward") for number, size in enumerate(sizes)]
    assert replay(step(*once, *frees)).peak_reserved == (12 + 12 + 10) * MIB


def test_history_leaves_the_free_blocks_that_the_step_uses() -> None:
    # The weights were made from a copy of 60. The step uses its block, so 100 are reserved, and not 130.
    history = step(
        (60, 7, "temporaries", "setup"),
        (40, 0, "parameters", "setup"),
        (-60, 7, "temporaries", "setup"),
    )
    events = step(
        (40, 0, "parameters", "setup"), (30, 1, "activations", "forward"), (-30, 1, "activations", "backward")
    )
    assert replay(events).peak_reserved == 70 * MIB
    found = replay(events, history)
    assert (found.peak_reserved, found.peak_allocated, found.peak.phase) == (100 * MIB, 100 * MIB, "setup")
    assert [point.total // MIB for point in found.curve] == [70, 40]


def test_repeated_step_frees_what_the_step_before_left() -> None:
    # Each step makes a batch (1), and frees that of the step before (0).
    events = step((4, 1, "batch", "forward"), (-4, 0, "batch", "forward"), (2, 2, "logits", "forward"))
    events += step((-2, 2, "logits", "backward"))
    assert repeated_blocks(events) == {0: 1}
    assert repeated_blocks(step((4, 1, "activations", "forward"))) is None, "a step that keeps more and more"


def test_a_step_that_empties_the_cache_is_repeated_with_the_same_blocks() -> None:
    events = step((4, 1, "batch", "forward"), (-4, 0, "batch", "forward"))
    events.append(Event(0, EMPTY_CACHE, "temporaries", "optimizer", "gpu"))
    assert not events[-1].is_allocation
    assert repeated_blocks(events) == {0: 1}
    found = replay([*step((4, 0, "batch", "setup")), *events])
    assert found.peak_allocated == 8 * MIB


def test_evaluation_follows_the_steps() -> None:
    events = step(
        (4, 0, "batch", "setup"), (4, 1, "batch", "forward"), (-4, 0, "batch", "forward"), (2, 2, "logits", "forward"),
        (-2, 2, "logits", "backward"),
    )  # fmt: skip
    after = step((50, 3, "logits", "evaluation"), (-4, 1, "batch", "evaluation"), (-50, 3, "logits", "evaluation"))
    found = replay(events, (), after)
    assert (found.peak_allocated, found.peak.phase) == (54 * MIB, "evaluation")
    assert {point.phase for point in found.curve} == {"forward", "backward"}


def test_curve_has_the_phases_and_the_peak_of_a_long_step() -> None:
    events = step((10, 0, "parameters", "setup"))
    for number in range(1, 2001):
        events += step((10 + number % 7, number, "activations", "forward"))
        events += step((-10 - number % 7, number, "activations", "forward"))
    events += step((500, 9999, "logits", "backward"), (-500, 9999, "logits", "backward"))
    found = replay(events)
    assert CURVE_POINTS / 2 <= len(found.curve) <= CURVE_POINTS
    assert max(point.total for point in found.curve) == found.peak_allocated == 510 * MIB
    assert {point.phase for point in found.curve} == {"forward", "backward"}


def test_host_memory_is_counted_apart() -> None:
    events = [Event(7 * MIB, 5, "optimizer_states", "setup", "host"), *STEP]
    assert host_peak(events) == 7 * MIB
    assert replay(events).peak_allocated == 160 * MIB
