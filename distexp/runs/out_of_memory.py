"""Errors that mean that memory is full, and texts about ``error.memory`` of a record.

``error.memory`` has what was in GPU memory when an allocation failed, and what would fit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from distexp.runs.entry_values import number_of

PARTS_WITHOUT_LABEL = ("unknown", "rest")
"""Parts that a text about a tensor leaves out: they explain nothing."""

MAX_TENSORS = 3
"""Largest tensors in a text; the record has more."""

GPU_IS_FULL = re.compile(
    r"OutOfMemoryError|Tried to allocate|STATUS_ALLOC_FAILED|(?i:(cuda|nccl|hip)\b[^\n]*out of memory)"
)
"""Texts of torch's allocator, also inside of an error of its compiler; of cuBLAS and cuDNN; and of CUDA and NCCL."""

HOST_IS_FULL = re.compile(r"MemoryError|std::bad_alloc|\[Errno 12\]|(?i:(can't|cannot) allocate memory|out of memory)")


def out_of_memory_status(error_type: str, message: str) -> str | None:
    """Return ``oom_gpu`` or ``oom_host`` for an error that means that memory is full; None for another error.

    Args:
        error_type: Name of the exception.
        message: Its text.
    """
    text = f"{error_type}: {message}"
    if GPU_IS_FULL.search(text):
        return "oom_gpu"
    return "oom_host" if HOST_IS_FULL.search(text) else None


def memory_lines(memory: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield name and text of each line of a panel."""
    yield "GPU memory", describe_numbers(memory)
    if parts := describe_parts(memory):
        yield "in memory", parts
    if largest := describe_largest(memory):
        yield "largest", largest
    if advice := describe_advice(memory):
        yield "would fit", advice


def describe_numbers(memory: Mapping[str, Any]) -> str:
    """Return the numbers: ``2,048 MiB requested at x.py:3 in forward, 500 of 81,559 MiB free, ...``."""
    place = f" at {memory['line']}" if memory.get("line") else ""
    requested, free, total, allocated, reserved = (
        _format_mib(memory, f"{name}_mib") for name in ("requested", "free", "total", "allocated", "reserved")
    )
    return (
        f"{requested} MiB requested{place}, {free} of {total} MiB free, {allocated} allocated by torch, "
        f"{reserved} reserved"
    )


def describe_parts(memory: Mapping[str, Any]) -> str:
    """Return what was allocated, largest part first: ``parameters 900, activations and temporaries 800``."""
    parts = memory.get("parts")
    if not isinstance(parts, dict):
        return ""
    sizes_mib = {key: mib for key in parts if (mib := number_of(parts, key)) is not None}
    largest_first = sorted(sizes_mib, key=lambda key: -sizes_mib[key])
    return ", ".join(f"{_part_title(key)} {_format_mib(parts, key)}" for key in largest_first)


def describe_largest(memory: Mapping[str, Any]) -> str:
    """Return the largest tensors: ``2 x 960 MiB x.py:3 in forward, 980 MiB lm_head.weight (parameters)``."""
    listed = memory.get("largest")
    tensors = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    return ", ".join(map(_describe_tensor, tensors[:MAX_TENSORS]))


def describe_advice(memory: Mapping[str, Any]) -> str:
    """Return what would have fit by an earlier prediction, or the command to type."""
    changes = memory.get("would_fit")
    if isinstance(changes, list) and changes:
        return f"{' '.join(map(str, changes))} (predicted before)"
    return f"type {memory['command']}" if memory.get("command") else ""


def _describe_tensor(entry: Mapping[str, Any]) -> str:
    count, part = entry.get("count"), entry.get("part")
    times = f"{count} x " if isinstance(count, int) and count > 1 else ""
    label = f" ({str(part).replace('_', ' ')})" if part and part not in PARTS_WITHOUT_LABEL else ""
    return f"{times}{_format_mib(entry, 'mib')} MiB {entry.get('line') or 'without a name'}{label}"


def _part_title(key: str) -> str:
    """Return the title of a key of ``parts``, as in ``optimizer states`` for ``optimizer_states_mib``."""
    part = key.removesuffix("_mib").replace("_", " ")
    return "activations and temporaries" if part == "rest" else part


def _format_mib(entry: Mapping[str, Any], key: str) -> str:
    mib = number_of(entry, key)
    return "unknown" if mib is None else f"{mib:,.0f}"
