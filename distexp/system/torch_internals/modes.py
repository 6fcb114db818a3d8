"""Private APIs of fake tensors and dispatch modes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from distexp.system.torch_internals.errors import explained


class FakeMode(Protocol):
    """Torch's mode in which tensors have shapes and no values."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *exception: Any) -> Any: ...


def make_fake_mode() -> FakeMode:
    """Return a mode in which tensors have shapes, types and devices, but no memory."""
    with explained("torch._subclasses.fake_tensor.FakeTensorMode"):
        from torch._subclasses.fake_tensor import FakeTensorMode

        logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # It logs errors that it raises.
        return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake_of(tensor: Tensor, mode: FakeMode) -> bool:
    """Return whether a tensor was made in this mode."""
    return getattr(tensor, "fake_mode", None) is mode


def has_values(tensor: Tensor) -> bool:
    """Return whether a tensor has values, and not only a shape as in a fake mode."""
    return getattr(tensor, "fake_mode", None) is None and not tensor.is_meta


@contextmanager
def without_fake_mode() -> Iterator[None]:
    """Run the block with real tensors, inside of a fake mode."""
    with explained("torch._subclasses.fake_tensor.unset_fake_temporarily"):
        from torch._subclasses.fake_tensor import unset_fake_temporarily
    with unset_fake_temporarily():
        yield


def fake_mode_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of operations that need the values of tensors."""
    with explained("torch._subclasses.fake_tensor"):
        from torch._subclasses.fake_tensor import (
            DataDependentOutputException,
            DynamicOutputShapeException,
            UnsupportedOperatorException,
        )

        return DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException


@contextmanager
def only_mode(mode: Any) -> Iterator[None]:
    """Run the block with this dispatch mode and no other one, and without function modes."""
    with explained("torch.utils._python_dispatch._disable_current_modes, torch.overrides._pop_mode_temporarily"):
        from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily
        from torch.utils._python_dispatch import _disable_current_modes
    with ExitStack() as stack:
        for _ in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
            stack.enter_context(_pop_mode_temporarily())
        stack.enter_context(_disable_current_modes())
        stack.enter_context(mode)
        yield


@contextmanager
def replaced_kernels(kernels: Mapping[str, Callable[..., Any]], dispatch_key: str) -> Iterator[None]:
    """Replace kernels of aten by Python functions, for one dispatch key, during the block."""
    with explained("torch.library.Library._destroy"):
        library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        end = library._destroy
    try:
        for name, kernel in kernels.items():
            library.impl(name, kernel, dispatch_key, allow_override=True)
        yield
    finally:
        end()
