"""Private APIs of tensors and autocast."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distexp.system.torch_internals.errors import explained


def tensor_norms(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the 2-norm of each tensor, computed in ``dtype`` by one kernel."""
    with explained("torch._foreach_norm"):
        return list(torch._foreach_norm(tensors, 2, dtype=dtype))


def scale_tensors(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply all tensors by a factor in place, with one kernel for all."""
    with explained("torch._foreach_mul_"):
        torch._foreach_mul_(tensors, factor)


def copy_tensors(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors into others of the same shapes, with one kernel for many."""
    with explained("torch._foreach_copy_"):
        torch._foreach_copy_(targets, sources)


def active_autocast_dtype(autocast: torch.autocast) -> torch.dtype | None:
    """Return the dtype that autocast uses; None if torch has disabled it."""
    with explained("torch.autocast._enabled"):
        return autocast.fast_dtype if autocast._enabled else None


def count_references(tensor: Any) -> tuple[int, int]:
    """Return the references of C++ to a tensor and to its storage, from inside of a dispatch mode."""
    with explained("Tensor._use_count, torch._C._storage_Use_Count"):
        return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
