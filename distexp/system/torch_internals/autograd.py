"""Private APIs of the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from distexp.system.torch_internals.errors import explained


@contextmanager
def around_backward(context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Run each backward pass of autograd in a context, during the block."""
    with explained("torch.autograd._engine_run_backward"):
        module: Any = torch.autograd
        original = module._engine_run_backward

    def run(*arguments: Any, **options: Any) -> Any:
        with context():
            return original(*arguments, **options)

    module._engine_run_backward = run
    try:
        yield
    finally:
        module._engine_run_backward = original


def queue_backward_callback(function: Callable[[], None]) -> None:
    """Run a function at the end of the current backward pass, in the order of these calls."""
    with explained("torch.autograd.Variable._execution_engine.queue_callback"):
        engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(function)
