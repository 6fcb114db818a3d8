"""Batch norms of models whose weights FSDP or DeepSpeed casts to 16 bits."""

from __future__ import annotations

from types import MethodType

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm


def use_fp32_batch_norms(model: nn.Module) -> None:
    """Let batch norms compute with their weights in fp32, as under autocast. Their running statistics are in fp32 too.

    torch has no batch norm on a CPU for weights in 16 bits and statistics in fp32. A class with its own ``forward``
    keeps it.
    """
    for module in model.modules():
        if isinstance(module, _BatchNorm) and type(module).forward is _BatchNorm.forward:
            # Not a partial, because torch.compile would compile each block again.
            module.forward = MethodType(_forward, module)  # type: ignore[method-assign]


def _forward(norm: _BatchNorm, inputs: Tensor) -> Tensor:
    """Compute what ``forward`` of a batch norm computes, with weights in fp32."""
    norm._check_input_dim(inputs)  # type: ignore[no-untyped-call]
    updates = norm.training and norm.track_running_stats
    if updates and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
    uses_statistics = updates or not norm.training
    return functional.batch_norm(
        inputs,
        norm.running_mean if uses_statistics else None,
        norm.running_var if uses_statistics else None,
        None if norm.weight is None else norm.weight.float(),
        None if norm.bias is None else norm.bias.float(),
        norm.training or norm.running_mean is None,
        _share_of_batch(norm, updates=updates),
        norm.eps,
    )


def _share_of_batch(norm: _BatchNorm, *, updates: bool) -> float:
    """Return the share of a batch in the new running statistics. Without a momentum they are means of all batches."""
    if norm.momentum is not None:
        return float(norm.momentum)
    return 1 / float(norm.num_batches_tracked) if updates and norm.num_batches_tracked is not None else 0.0
