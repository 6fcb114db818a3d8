"""The order in which the search tries sizes, on machines whose speed and memory are formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from distexp.config.model_checks import divisors
from distexp.runs.step_files import FITS, OUT_OF_MEMORY, TOO_LARGE, MicroBatchSearch, TriedSize, describe_search
from distexp.worker.size_trial import SizeSearch, ladder

USABLE = 1000.0


def linear(base: float, per_sample: float) -> Callable[[int], float]:
    return lambda size: base + per_sample * size


PLENTY = linear(100, 1)


def rising(size: int) -> float:
    return 100 * size / (size + 4)


def run(
    samples: int,
    *,
    speed: Callable[[int], float] = rising,
    memory: Callable[[int], float] = PLENTY,
    limit: int = 10**6,
    compiled: bool = False,
    saved: float = 0.0,
) -> SizeSearch:
    """Search until the end on a machine with USABLE memory, on which the whole batch needs less than the formula."""
    search = SizeSearch(divisors(samples, limit), [], compiled, saved)
    while (size := search.next_size()) is not None:
        peak = memory(size) - (saved if size == samples else 0)
        outcome = FITS if peak <= 0.95 * USABLE else TOO_LARGE if peak <= USABLE else OUT_OF_MEMORY
        measured = (speed(size), peak, memory(0), USABLE) if outcome != OUT_OF_MEMORY else ()
        search = replace(search, tried=[*search.tried, TriedSize(size, outcome, *measured)])
    return search


def tried(search: SizeSearch) -> list[int]:
    return [candidate.micro_batch_size for candidate in search.tried]


def test_sizes_are_the_divisors_that_the_samples_of_a_worker_allow() -> None:
    assert divisors(48, 48) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 48]
    assert divisors(48, 10) == [1, 2, 3, 4, 6, 8]
    assert ladder(divisors(48, 48)) == [1, 2, 4, 8, 16, 24, 48]
    assert ladder(divisors(7, 7)) == [1, 7]


def test_sizes_double_to_the_whole_batch() -> None:
    search = run(64)
    assert (tried(search), search.choose(), search.too_large()) == ([1, 2, 4, 8, 16, 32, 64], 64, None)


def test_the_search_ends_when_the_speed_no_longer_rises() -> None:
    search = run(1024, speed=lambda size: min(size, 8) - size / 1000)
    assert (tried(search), search.choose()) == ([1, 2, 4, 8, 16, 32], 8)


def test_one_slow_moment_does_not_end_the_search() -> None:
    assert run(64, speed=lambda size: 1.0 if size == 4 else rising(size)).choose() == 64


def test_equal_speeds_give_the_smallest_size() -> None:
    assert run(64, speed=lambda size: 50 + (size == 16) / 10).choose() == 1


def test_a_size_that_needs_too_much_memory_is_not_tried() -> None:
    search = run(64, memory=linear(100, 20))
    assert (tried(search), search.choose(), search.too_large()) == ([1, 2, 4, 8, 16, 32], 32, 64)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_whole_batch_that_saves_memory_is_tried(compiled: bool) -> None:
    """A single micro-batch needs no fp32 gradients with ``train.fused_update``."""
    memory = linear(300, 11)
    assert run(64, memory=memory, compiled=compiled).choose() == 32
    search = run(64, memory=memory, compiled=compiled, saved=60)
    assert (search.choose(), search.too_large()) == (64, None)
    assert [candidate.outcome for candidate in search.tried] == [FITS] * len(search.tried)


def test_sizes_between_two_doublings_are_tried_if_memory_is_the_limit() -> None:
    search = run(36, memory=linear(100, 80))
    assert tried(search) == [1, 2, 4, 6, 9]
    assert (search.choose(), search.too_large()) == (9, 12)


def test_memory_that_grows_faster_than_predicted_ends_the_search() -> None:
    """For example, the peak of small sizes is in the update of the optimizer."""
    search = run(36, memory=lambda size: max(900.0, 100.0 * size))
    assert [(candidate.micro_batch_size, candidate.outcome) for candidate in search.tried[-3:]] == [
        (6, FITS),
        (12, OUT_OF_MEMORY),
        (9, FITS),
    ]
    assert search.choose() == 9


def test_a_size_that_leaves_too_little_memory_is_not_chosen() -> None:
    search = run(16, memory=lambda size: 980.0 if size >= 8 else 100.0)
    assert [candidate.outcome for candidate in search.tried] == [FITS, FITS, FITS, TOO_LARGE]
    assert search.choose() == 4


@pytest.mark.parametrize("compiled", [False, True])
def test_nothing_is_chosen_if_nothing_fits(compiled: bool) -> None:
    search = run(8, memory=lambda size: 2000.0, compiled=compiled)
    assert tried(search) == ([4, 2, 1] if compiled else [1])
    assert search.choose() is None


@pytest.mark.parametrize(
    ("samples", "speed", "memory", "expected", "chosen"),
    [
        (64, rising, linear(100, 1), [4, 64, 32], 64),
        (1024, rising, linear(100, 10), [4, 64, 32], 64),
        (64, lambda size: 100 - abs(size - 16), linear(100, 1), [4, 64, 32, 16, 8], 16),
        (64, rising, lambda size: max(400.0, 29.0 * size), [4, 64, 32, 16], 32),
        (2, rising, linear(100, 1), [2], 2),
        (3, rising, linear(100, 1), [3], 3),
        (1, rising, linear(100, 1), [1], 1),
        (10, rising, linear(100, 1), [2, 10, 5], 10),
    ],
)
def test_a_compiled_model_jumps_to_the_largest_size(
    samples: int, speed: Callable[[int], float], memory: Callable[[int], float], expected: list[int], chosen: int
) -> None:
    search = run(samples, speed=speed, memory=memory, compiled=True)
    assert (tried(search), search.choose()) == (expected, chosen)


@pytest.mark.parametrize(("per_sample", "chosen"), [(1, 64), (12, 32), (50, 8), (200, 4)])
def test_without_time_for_a_second_compilation_the_memory_decides(per_sample: float, chosen: int) -> None:
    memory = linear(100, per_sample)
    first = TriedSize(4, FITS, rising(4), memory(4), memory(0), USABLE)
    search = SizeSearch(divisors(64, 64), [first], compiled=True)
    assert search.choose() == chosen
    assert memory(chosen) <= 0.7 * USABLE or chosen == 4


def test_the_terminal_shows_what_was_tried() -> None:
    tries = [TriedSize(size, FITS, 1.0) for size in (1, 2, 8)] + [
        TriedSize(16, OUT_OF_MEMORY),
        TriedSize(12, TOO_LARGE),
    ]
    found = MicroBatchSearch(8, tries, 12.4)
    assert describe_search(found) == (
        "micro-batch: 8 (of 1, 2, 8; 12 left too little memory; 16 ran out of memory; 12 s)"
    )
    assert describe_search(MicroBatchSearch(8, tries[:3], 12.4, "F", 16)) == (
        "micro-batch: 8 (of 1, 2, 8; 16 would not fit; from F)"
    )
    assert not found.untried
    short = MicroBatchSearch(64, tries[:1], 80.2, complete=False)
    assert short.untried
    assert describe_search(short) == ("micro-batch: 64 (of 1; chosen by its memory, because the time was over; 80 s)")
    assert describe_search(MicroBatchSearch(2, tries[:2], 80.2, complete=False)) == (
        "micro-batch: 2 (of 1, 2; then the time was over; 80 s)"
    )
