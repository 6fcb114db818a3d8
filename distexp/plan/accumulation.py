"""Sums of gradients: autograd adds one gradient to another in place, but not if tensors are fake."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from distexp.system.torch_internals.modes import make_fake_mode
from distexp.system.torch_internals.tensors import count_references


class Accumulation:
    """Recognizes the operations that autograd would do in place. It does so if only itself refers to a gradient."""

    def __init__(self) -> None:
        self._unshared = count_references_to_gradient()

    def is_in_place(self, func: Any, arguments: Any) -> bool:
        """Return whether an operation of the backward pass adds a gradient to its first argument."""
        if func is not torch.ops.aten.add.Tensor or torch.is_grad_enabled():
            return False
        old, new = arguments[:2]
        fits = isinstance(new, Tensor) and old.shape == new.shape and old.dtype == new.dtype
        return fits and count_references(old) == self._unshared


def count_references_to_gradient() -> tuple[int, int]:
    """Return ``count_references`` of a gradient to which only autograd refers, when it adds another one to it."""
    watch = _Watch()
    with make_fake_mode(), watch:
        value = torch.empty(1, requires_grad=True)
        torch.autograd.backward([(value.sin() + value.cos()).sum()])
    (found,) = watch.found
    return found


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the references to each gradient to which another one is added."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add.Tensor and not torch.is_grad_enabled():
            self.found.append(count_references(args[0]))
        return func(*args, **(kwargs or {}))
