"""Activation checkpointing of a block, whose batch norms still count each batch once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint


def checkpointed(block: nn.Module, forward: Callable[..., Any], *, in_graph: bool) -> Callable[..., Any]:
    """Return a function that computes a block and recomputes its activations in the backward pass.

    Args:
        block: the block.
        forward: its computation, possibly compiled.
        in_graph: whether the result becomes part of a larger compiled graph. There torch updates the running
            statistics of batch norms once by itself.
    """
    statistics = [] if in_graph else _running_statistics(block)
    options: dict[str, Any] = {"context_fn": partial(_contexts, statistics)} if statistics else {}
    return partial(checkpoint, forward, use_reentrant=False, **options)


def _running_statistics(block: nn.Module) -> list[Tensor]:
    norms = (module for module in block.modules() if isinstance(module, _BatchNorm))
    return [buffer for norm in norms for buffer in norm.buffers()]


def _contexts(statistics: Sequence[Tensor]) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of the forward pass and of the recomputation."""
    return nullcontext(), _unchanged(statistics)


@contextmanager
def _unchanged(statistics: Sequence[Tensor]) -> Iterator[None]:
    """Restore the running statistics at the end of the block."""
    before = [tensor.detach().clone() for tensor in statistics]
    try:
        yield
    finally:
        for tensor, value in zip(statistics, before, strict=True):
            tensor.data.copy_(value)  # not tensor.copy_, because autograd has saved the tensor
