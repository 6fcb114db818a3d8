"""Progress of predictions on stderr: a line for each step, or on a terminal one that changes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from distexp.runs.listing import format_count


@contextmanager
def show_predictions(total: int, remark: str) -> Iterator[Callable[[], None]]:
    """Show on stderr that memory is predicted: a line, or on a terminal a progress bar until the block ends.

    Args:
        total: Number of configurations that are not in the cache.
        remark: What to add to the line.

    Yields:
        Function to call after each prediction.
    """
    console = Console(stderr=True)
    if not console.is_terminal or not total:
        if total:
            _print(f"predicting the memory of {format_count(total, 'configuration')}{remark}")
        yield lambda: None
        return
    columns = (TextColumn("predicting"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda: progress.advance(task)


@contextmanager
def show_search(title: str, most: int, remark: str = "") -> Iterator[Callable[[], None]]:
    """Show on stderr that variants are predicted, and how many are done.

    Args:
        title: What is searched.
        most: Number of variants that are predicted at most.
        remark: What to add to the title.

    Yields:
        Function to call after each prediction.
    """
    console, title = Console(stderr=True), f"searching for {title}"
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        show(f"{done} of at most {format_count(most, 'variant')} predicted")

    if console.is_terminal:
        with console.status(f"{title}{remark}") as status:

            def show(text: str) -> None:
                status.update(f"{title}: {text}{remark}")

            yield advance
    else:
        show = _print
        show(f"{title}{remark}")
        yield advance


def _print(text: str) -> None:
    print(f"distexp: {text}", file=sys.stderr)
