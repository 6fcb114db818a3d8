"""Lists and counts in messages: ``a, b and 3 more``, ``2 runs``, ``runs 0-5, 8``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

MAX_ITEMS = 8


def join_first(items: Iterable[str], limit: int = MAX_ITEMS) -> str:
    """Join the first items with commas and count the others: ``a, b and 3 more``."""
    known = list(items)
    rest = len(known) - limit
    return ", ".join(known[:limit]) + (f" and {rest} more" if rest > 0 else "")


def format_ids(numbers: Sequence[int]) -> str:
    """Join run numbers: ``0-5, 8, 9``.

    Three or more consecutive numbers become a range.
    """
    blocks = _consecutive(numbers)
    return join_first(
        text for block in blocks for text in ([f"{block[0]}-{block[-1]}"] if len(block) > 2 else map(str, block))
    )


def format_count(count: int, noun: str) -> str:
    """Return a count with its noun in singular or plural: ``1 run``, ``2 runs``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def format_runs(numbers: Sequence[int]) -> str:
    """Name runs by number: ``run 3``, ``runs 0-5, 8``."""
    return f"run{'' if len(numbers) == 1 else 's'} {format_ids(numbers)}"


def _consecutive(numbers: Sequence[int]) -> Iterator[list[int]]:
    """Yield blocks of consecutive numbers, in ascending order."""
    block: list[int] = []
    for number in sorted(numbers):
        if block and number != block[-1] + 1:
            yield block
            block = []
        block.append(number)
    if block:
        yield block
