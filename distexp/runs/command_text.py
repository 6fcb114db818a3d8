"""Command lines as a user types them: overrides, and commands that a message suggests."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

TYPED_BOOLEAN = re.compile(r"(?<=[=,\[:])(True|False)(?=[,\]}]|$)")
"""A boolean as Hydra writes it in the overrides of a sweep."""


def format_override(text: str) -> str:
    """Return an override as it is typed: without Hydra's quotes, and with ``true`` for ``True``."""
    return TYPED_BOOLEAN.sub(lambda found: found[0].lower(), text.replace("'", ""))


def suggest_command(name: str, directory: Path) -> str:
    """Return the command line of a sub-command: ``distexp status DIR``."""
    return f"distexp {name} {shlex.quote(str(directory))}"
