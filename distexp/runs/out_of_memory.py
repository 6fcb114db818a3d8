"""Texts about ``error.memory`` of a record: what was in GPU memory when an allocation failed, and what would fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

UNNAMED = ("unknown", "rest")
"""Parts that are not worth a label."""

MOST_SHOWN = 3
"""Largest tensors in a text; the record has more."""


def memory_lines(memory: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield name and text of each line of a panel."""
    yield "GPU memory", describe_numbers(memory)
    if parts := _parts(memory):
        yield "in memory", parts
    if largest := describe_largest(memory):
        yield "largest", largest
    if advice := describe_advice(memory):
        yield "would fit", advice


def describe_numbers(memory: Mapping[str, Any]) -> str:
    """Return the numbers: ``2,048 MiB requested at x.py:3 in forward, 500 of 81,559 MiB free, ...``."""
    place = f" at {memory['line']}" if memory.get("line") else ""
    requested, free, total, allocated, reserved = (
        _mib(memory.get(f"{name}_mib")) for name in ("requested", "free", "total", "allocated", "reserved")
    )
    return (
        f"{requested} MiB requested{place}, {free} of {total} MiB free, {allocated} allocated by torch, "
        f"{reserved} reserved"
    )


def describe_largest(memory: Mapping[str, Any]) -> str:
    """Return the largest tensors: ``2 x 960 MiB x.py:3 in forward, 980 MiB lm_head.weight (parameters)``."""
    listed = memory.get("largest")
    entries = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    return ", ".join(map(_tensor, entries[:MOST_SHOWN]))


def describe_advice(memory: Mapping[str, Any]) -> str:
    """Return what would have fit by an earlier prediction, or the command to type."""
    changes = memory.get("would_fit")
    if isinstance(changes, list) and changes:
        return f"{' '.join(map(str, changes))} (predicted before)"
    return f"type {memory['command']}" if memory.get("command") else ""


def _tensor(entry: Mapping[str, Any]) -> str:
    count, part = entry.get("count"), str(entry.get("part") or UNNAMED[0])
    times = f"{count} x " if isinstance(count, int) and count > 1 else ""
    label = "" if part in UNNAMED else f" ({part.replace('_', ' ')})"
    return f"{times}{_mib(entry.get('mib'))} MiB {entry.get('line') or 'without a name'}{label}"


def _parts(memory: Mapping[str, Any]) -> str:
    parts = memory.get("parts")
    known = {name: size for name, size in parts.items() if _is_number(size)} if isinstance(parts, dict) else {}
    ordered = sorted(known.items(), key=lambda item: -item[1])
    return ", ".join(f"{_title(name)} {_mib(size)}" for name, size in ordered)


def _title(name: str) -> str:
    part = name.removesuffix("_mib").replace("_", " ")
    return "activations and temporaries" if part == "rest" else part


def _mib(value: object) -> str:
    return f"{value:,.0f}" if _is_number(value) else "unknown"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
