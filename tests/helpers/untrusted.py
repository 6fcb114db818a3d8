"""Objects whose pickles run code, for tests that such files are refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

FUNCTION = f"{os.system.__module__}.system"
"""The function that the pickle calls, as messages name it."""


class Command:
    """An object whose pickle creates a file when it is loaded.

    Args:
        marker: the file.
    """

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.marker}",)
