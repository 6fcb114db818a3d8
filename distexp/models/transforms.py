"""Activation checkpointing and compilation of blocks, before distribution."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from distexp.config import Config
from distexp.models.introspection import find_blocks


def transform_blocks(model: nn.Module, config: Config) -> None:
    """Apply ``train.activation_checkpointing`` and ``train.compile`` to the blocks.

    Only ``forward`` of a block is replaced, so names and parameters stay. The hooks of FSDP and ZeRO, which
    gather parameters, are outside of the recomputed or compiled function.
    """
    if not (config.train.activation_checkpointing or config.train.compile):
        return
    for _, block in find_blocks(model, config.fsdp.wrap):
        forward = block.forward
        if config.train.compile:
            forward = torch.compile(forward)
        if config.train.activation_checkpointing:
            forward = partial(checkpoint, forward, use_reentrant=False)
        block.forward = forward
