"""Lines printed exactly as they are: rich would style numbers, wrap paths, and replace ``[...]`` and ``:name:``."""

from __future__ import annotations

from rich.console import Console


def print_plain(console: Console, text: str, style: str | None = None) -> None:
    """Print a text in one style, without markup, emoji and line breaks."""
    console.print(text, style=style, highlight=False, markup=False, emoji=False, soft_wrap=True)
