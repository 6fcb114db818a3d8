"""The error if a private API of PyTorch differs from what distexp expects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class TorchInternalsChangedError(RuntimeError):
    """A private API that distexp uses differs in the installed PyTorch release."""


@contextmanager
def explained(name: str) -> Iterator[None]:
    """Raise TorchInternalsChangedError if the block finds another API than expected; ``name`` is its name."""
    try:
        yield
    except (AttributeError, ImportError, TypeError) as error:
        raise TorchInternalsChangedError(
            f"{name} of PyTorch {torch.__version__} is not as distexp expects ({error}): "
            "install the version of PyTorch in requirements.txt, or adapt distexp/system/torch_internals"
        ) from error
