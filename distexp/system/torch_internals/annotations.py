"""Names on the profiler's timeline for parts of the training loop. Without the profiler they cost a check of a flag."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

T = TypeVar("T")

DATA = "distexp:data"
"""The training loop waits for a batch."""
OPTIMIZER = "distexp:optimizer"
"""Gradient clipping, update of the weights, and clearing of the gradients."""


class _State:
    """Whether the profiler of this process runs."""

    active = False


def activate_annotations(*, active: bool) -> None:
    """Turn annotations on while the profiler runs, or off."""
    _State.active = active


def annotate(name: str) -> AbstractContextManager[Any]:
    """Return a context whose duration the profiler records under a name."""
    if not _State.active:
        return nullcontext()
    from torch.profiler import record_function

    return record_function(name)


def annotate_items(name: str, items: Iterable[T]) -> Iterator[T]:
    """Yield the items; the time until each one is there is annotated."""
    iterator = iter(items)
    while True:
        with annotate(name):
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item
