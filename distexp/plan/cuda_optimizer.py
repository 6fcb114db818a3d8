"""Optimizers of fake tensors, with the kernels of CUDA."""

from __future__ import annotations

import torch
from torch import nn

from distexp.config import Config
from distexp.strategies.fused_adamw import FusedAdamW
from distexp.strategies.optimizer import build_optimizer


def make_optimizer(module: nn.Module, config: Config) -> torch.optim.Optimizer:
    """Return the optimizer of a run, with the kernels that it uses on CUDA."""
    optimizer = build_optimizer(module, config.train, fused=False)
    use_cuda_kernels(config, optimizer)
    return optimizer


def use_cuda_kernels(config: Config, optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer of tensors on the GPU use the kernels that it uses on CUDA."""
    if config.offload.enabled:
        return
    if isinstance(optimizer, FusedAdamW):
        optimizer.update = lambda updates, scale: None  # It reads addresses, and allocates less than 2 MB.
        return
    for group in optimizer.param_groups:
        if config.train.optimizer == "adamw":
            group["fused"], group["foreach"] = True, False
        else:
            group["foreach"] = True
