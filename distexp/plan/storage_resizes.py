"""Observation of storages that change their size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def on_storage_resize(call: Callable[[torch.UntypedStorage, int], None]) -> Iterator[None]:
    """Call a function before each change of the size of a storage, during the block. No dispatch mode sees these."""
    resize = torch.UntypedStorage.resize_

    def resize_and_call(storage: torch.UntypedStorage, size: int) -> Any:
        call(storage, size)
        return resize(storage, size)

    torch.UntypedStorage.resize_ = resize_and_call  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
