"""Reading of the user's ds_config.json, the file in ``deepspeed.config_file``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def get_nested(settings: Any, keys: tuple[str, ...]) -> Any:
    """Return the value at a path of keys; None if it does not exist."""
    for key in keys:
        if not isinstance(settings, dict):
            return None
        settings = settings.get(key)
    return settings


def read_or_empty(path: str | None) -> dict[str, Any]:
    """Return the content of a ds_config file; empty if there is none or it is invalid."""
    try:
        return read_file(path)
    except ValueError:
        return {}


def read_file(path: str | None) -> dict[str, Any]:
    """Return the content of a ds_config file; empty if there is none.

    Raises:
        ValueError: it is not a JSON object.
    """
    if path is None or not Path(path).is_file():
        return {}
    settings = json.loads(Path(path).read_text())
    if not isinstance(settings, dict):
        raise ValueError(f"it is a {type(settings).__name__}")
    return settings
