"""Repairs of DeepSpeed's optimizer for 16 bits at stage 0, and access to its fp32 masters.

With fp16, the optimizer of DeepSpeed 0.19 divides the gradients by the loss scale at stage 0, but ``engine.backward``
does not multiply the loss by it, as it does at the other stages. So a model hardly learns. With fp16 and bf16, it runs
one step of AdamW or SGD with gradients of 0 to allocate the states. So AdamW's first updates are smaller than those of
the other strategies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def unpartitioned_masters(engine: Any) -> dict[int, Tensor]:
    """Return the fp32 masters of stage 0 by the id of the 16-bit parameter; empty at other stages and in fp32."""
    if engine.zero_optimization_stage() > 0:
        return {}
    optimizer = engine.optimizer
    groups = zip(getattr(optimizer, "fp16_groups", ()), getattr(optimizer, "fp32_groups", ()), strict=True)
    return {id(rounded): master for group in groups for rounded, master in zip(*group, strict=True)}


def repair_16_bits(engine: Any) -> None:
    """Reset the states of stage 0. With fp16, also scale its losses, and remove the scale from its gradient norms.

    Nothing is done at the other stages and in fp32. The first step also changes the masters, so they must be restored
    afterwards.
    """
    if unpartitioned_masters(engine):
        _reset_states(engine.optimizer.optimizer)
        if engine.fp16_enabled():
            _scale_losses(engine)


def _reset_states(optimizer: torch.optim.Optimizer) -> None:
    """Set all states to 0, as before the first step."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                value.zero_()


def _scale_losses(engine: Any) -> None:
    backward, step, optimizer = engine.backward, engine.step, engine.optimizer

    def scaled_backward(loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        # Setting the gradient of the loss is also right for a version of DeepSpeed that scales the loss.
        factor = optimizer.loss_scale / (engine.gradient_accumulation_steps() if scale_wrt_gas else 1)
        loss.register_hook(lambda gradient: torch.full_like(gradient, factor))  # type: ignore[no-untyped-call]
        result: Tensor = backward(loss, retain_graph=retain_graph, scale_wrt_gas=scale_wrt_gas)
        return result

    def step_with_norm(*arguments: Any) -> None:
        updates, scale = engine.is_gradient_accumulation_boundary(), optimizer.loss_scale
        step(*arguments)
        if updates:
            engine._global_grad_norm /= scale

    engine.backward, engine.step = scaled_backward, step_with_norm
