"""Commands that this user has typed. Their sweeps are resumed without typing again what can run code.

A mark in the user's cache names the content of each ``command.json`` that distexp has written. A sweep from somebody
else has no mark, even in a copy that belongs to the user.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from distexp.data.cache import cache_dir


def remember_command(path: Path) -> None:
    """Mark a ``command.json`` as this user's own; without a writable cache it stays foreign."""
    with suppress(OSError):
        mark = _mark(path)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def is_own_command(path: Path) -> bool:
    """Return whether distexp has written this content for this user."""
    return _mark(path).exists()


def _mark(path: Path) -> Path:
    return cache_dir() / "commands" / hashlib.sha256(path.read_bytes()).hexdigest()
