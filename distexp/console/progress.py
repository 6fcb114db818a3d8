"""Progress bar of the steps before the runs of a large sweep start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

MIN_CELLS = 20
"""Number of cells from which a bar is shown; fewer take less than a second."""


@contextmanager
def show_progress(step: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar on stderr until the block ends, if stderr is a terminal. Stdout may be redirected to a file.

    Args:
        step: What is done, as in ``composing``.
        total: Number of cells.

    Yields:
        Function to call after each cell.
    """
    if total < MIN_CELLS:
        yield lambda: None
        return
    from rich.console import Console  # A single run needs none of this before its workers start.
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda: None
        return
    columns = (TextColumn("{task.description:>10}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Without a thread that refreshes the bar, because processes are forked while it is shown.
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        task = progress.add_task(step, total=total)
        progress.refresh()

        def advance() -> None:
            progress.advance(task)
            if progress.tasks[0].completed % max(1, total // 100) == 0:
                progress.refresh()

        yield advance
