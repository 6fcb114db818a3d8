"""Texts about ``error.memory`` of a record: what was in GPU memory when an allocation failed, and what would fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

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
    return (
        f"{_mib(memory['requested_mib'])} MiB requested{place}, {_mib(memory['free_mib'])} of "
        f"{_mib(memory['total_mib'])} MiB free, {_mib(memory['allocated_mib'])} allocated by torch, "
        f"{_mib(memory['reserved_mib'])} reserved"
    )


def describe_largest(memory: Mapping[str, Any]) -> str:
    """Return the largest tensors: ``2 x 960 MiB x.py:3 in forward, 980 MiB lm_head.weight (parameters)``."""
    return ", ".join(map(_tensor, (memory.get("largest") or ())[:MOST_SHOWN]))


def describe_advice(memory: Mapping[str, Any]) -> str:
    """Return what would have fit by an earlier prediction, or the command to type."""
    if changes := memory.get("would_fit"):
        return f"{' '.join(changes)} (predicted before)"
    return f"type {memory['command']}" if memory.get("command") else ""


def _tensor(entry: Mapping[str, Any]) -> str:
    count = f"{entry['count']} x " if entry.get("count", 1) > 1 else ""
    part = "" if entry["part"] in ("rest", "unknown") else f" ({entry['part'].replace('_', ' ')})"
    return f"{count}{_mib(entry['mib'])} MiB {entry.get('line') or 'without a name'}{part}"


def _parts(memory: Mapping[str, Any]) -> str:
    sizes = sorted((memory.get("parts") or {}).items(), key=lambda item: -item[1])
    return ", ".join(f"{_title(name)} {_mib(size)}" for name, size in sizes)


def _title(name: str) -> str:
    part = name.removesuffix("_mib").replace("_", " ")
    return "activations and temporaries" if part == "rest" else part


def _mib(value: float) -> str:
    return f"{value:,.0f}"
