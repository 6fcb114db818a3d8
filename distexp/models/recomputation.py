"""Activation checkpointing of a block, whose batch norms still count each batch once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn
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
    norms = [] if in_graph else [module for module in block.modules() if isinstance(module, _BatchNorm)]
    options: dict[str, Any] = {"context_fn": partial(_contexts, norms)} if norms else {}
    return partial(checkpoint, forward, use_reentrant=False, **options)


def _contexts(norms: Sequence[nn.Module]) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of the forward pass and of the recomputation."""
    return nullcontext(), _unchanged_statistics(norms)


@contextmanager
def _unchanged_statistics(norms: Sequence[nn.Module]) -> Iterator[None]:
    """Restore the running statistics, which are other tensors than those of the model before it is on its device."""
    before = [(buffer, buffer.detach().clone()) for norm in norms for buffer in norm.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.data.copy_(value)  # not buffer.copy_, because autograd has saved the buffer
