"""The console of commands that print tables."""

from __future__ import annotations

import os

from rich.console import Console

PIPED_WIDTH = 240  # characters, if the output is not a terminal


def make_console() -> Console:
    """Return a console as wide as the terminal; without one, as PIPED_WIDTH."""
    console = Console(emoji=False)
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return Console(width=PIPED_WIDTH, emoji=False)
