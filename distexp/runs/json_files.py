"""JSON files that a crash never leaves half written, and that another program may have changed."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from distexp.config.value_checks import MAX_DIGITS
from distexp.runs.files import replace_atomically
from distexp.runs.printable import CONTROL, printable_content
from distexp.runs.regular_files import open_file
from distexp.system.units import MIB

MAX_JSON_MB = 256
"""Size of the largest JSON file that is read. A record with thousands of ranks has a few MB."""


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically; NaN and infinities become null.

    The content is on disk before the name is, so that a machine that goes down leaves no torn file.
    """
    with replace_atomically(path) as temporary, temporary.open("w") as file:
        json.dump(nan_to_none(content), file, indent=2, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def read_json(path: Path) -> Any:
    """Read a JSON file. NaN and infinity become None.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is not JSON, or contains a number that no distexp writes, or is larger than MAX_JSON_MB.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size / MIB
        if size > MAX_JSON_MB:
            raise ValueError(f"it has {size:,.0f} MB, more than {MAX_JSON_MB}")
        return parse_json(file.read().decode())


def read_or_none(path: Path, *keys: str) -> Any:
    """Return the content of a JSON file, or the value of its keys; None if it is missing, or the file is damaged."""
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return None
    for key in keys:
        content = content.get(key) if isinstance(content, dict) else None
    return content


def parse_json(text: str) -> Any:
    """Parse JSON from a file that another program may have written.

    Control characters become visible, because a terminal would obey them.

    Raises:
        ValueError: if it is not JSON, or contains a number that no distexp writes.
    """
    try:
        content = json.loads(text, parse_int=_parse_int, parse_float=_parse_float, parse_constant=lambda _: None)
        return printable_content(content) if "\\u" in text or CONTROL.search(text) else content
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _parse_int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"it contains a number of {len(text)} digits")
    return int(text)


def _parse_float(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def nan_to_none(content: Any) -> Any:
    """Return the same content with None for NaN and the infinities, which JSON does not have."""
    if isinstance(content, float) and not math.isfinite(content):
        return None
    if isinstance(content, dict):
        return {key: nan_to_none(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [nan_to_none(value) for value in content]
    return content
