"""Messages about the build of DeepSpeed's operators."""

from __future__ import annotations

from typing import Any

COMPILE_MIN = 3
"""Minutes that one of DeepSpeed's operators takes to compile, measured on two cores: 2 to 4."""


def build_message(entry: dict[str, Any]) -> str | None:
    """Return the line for one change of a build; None for the passing of time.

    Args:
        entry: A line of ``operators.jsonl``.
    """
    if "compiling" in entry:
        return f"compiling DeepSpeed's operator {entry['compiling']}, once, about {COMPILE_MIN} minutes"
    if "waiting" in entry:
        return f"DeepSpeed's operators: waiting for {entry['waiting']}"
    if "compiled_s" in entry:
        return f"DeepSpeed's operators were compiled in {entry['compiled_s']} s"
    if "waited_s" in entry:
        waited = f"this run waited {entry['waited_s']} s for another run that compiled them"
        return f"DeepSpeed's operators are ready: {waited}"
    if "step" in entry:
        return f"compiling: step {entry['step']} of {entry['steps']}, {entry['elapsed_s']} s"
    return None
