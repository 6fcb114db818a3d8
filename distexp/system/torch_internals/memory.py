"""Private APIs of the memory of GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from distexp.system.torch_internals.errors import explained


def start_memory_history(max_entries: int) -> None:
    """Record each allocation of GPU memory with its Python stack, and each free."""
    with explained("torch.cuda.memory._record_memory_history"):
        torch.cuda.memory._record_memory_history("all", "alloc", "python", max_entries, clear_history=True)


def on_out_of_memory(call: Callable[[int, int, int, int], None]) -> None:
    """Call a function with GPU and requested, total and free bytes before torch raises an out-of-memory error."""
    with explained("torch._C._cuda_attach_out_of_memory_observer"):
        torch._C._cuda_attach_out_of_memory_observer(call)  # type: ignore[attr-defined]


def stop_memory_history(device: int) -> list[dict[str, Any]]:
    """End the recording; return the entries of a GPU in order: ``action``, ``addr``, ``size`` and ``frames``."""
    with explained("torch.cuda.memory._snapshot"):
        entries: list[dict[str, Any]] = torch.cuda.memory._snapshot()["device_traces"][device]
        torch.cuda.memory._record_memory_history(None)
        return entries
