"""Lists and counts in messages."""

from __future__ import annotations

import pytest

from distexp.config.overrides import format_count, format_ids, format_runs, join_first


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([3], "3"),
        ([0, 1], "0, 1"),
        ([0, 1, 2, 3, 4, 5], "0-5"),
        ([5, 0, 1, 2, 7, 8], "0-2, 5, 7, 8"),
        (list(range(0, 40, 2)), "0, 2, 4, 6, 8, 10, 12, 14 and 12 more"),
    ],
)
def test_consecutive_numbers_become_a_range(numbers: list[int], text: str) -> None:
    assert format_ids(numbers) == text


def test_only_the_first_items_are_joined() -> None:
    assert join_first("abc", limit=3) == "a, b, c"
    assert join_first("abcde", limit=3) == "a, b, c and 2 more"


def test_a_count_has_its_plural() -> None:
    assert [format_count(count, "run") for count in (0, 1, 2)] == ["0 runs", "1 run", "2 runs"]
    assert [format_runs(numbers) for numbers in ([4], [1, 2, 3])] == ["run 4", "runs 1-3"]
