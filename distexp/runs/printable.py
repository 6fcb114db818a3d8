"""Text from files without characters that a terminal would obey."""

from __future__ import annotations

import re
from typing import Any

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that change the state of a terminal or the direction of a text, or that no file can contain."""


def printable(text: str) -> str:
    """Replace control characters, except line breaks and tabs, by visible escape codes."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def printable_content(content: Any) -> Any:
    """Return the content of a JSON file with all its texts printable."""
    if isinstance(content, str):
        return printable(content)
    if isinstance(content, dict):
        return {printable(key): printable_content(value) for key, value in content.items()}
    return [printable_content(value) for value in content] if isinstance(content, list) else content
