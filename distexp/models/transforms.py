"""Activation checkpointing and compilation of blocks, before distribution."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from distexp.config import Config
from distexp.models.introspection import find_blocks, find_units


def transform_blocks(model: nn.Module, config: Config) -> None:
    """Apply ``train.activation_checkpointing`` and ``train.compile`` to the blocks.

    Only ``forward`` of a block is replaced, so names and parameters stay. The hooks of FSDP and ZeRO, which
    gather parameters, are outside of the recomputed or compiled function.
    """
    for block in _blocks_to_transform(model, config):
        forward = block.forward
        if config.train.compile:
            forward = torch.compile(forward)
        if config.train.activation_checkpointing:
            forward = partial(checkpoint, forward, use_reentrant=False)
        block.forward = forward


def _blocks_to_transform(model: nn.Module, config: Config) -> list[nn.Module]:
    """Return the blocks; if there are none, the whole model can be compiled, but not checkpointed.

    Checkpointing a whole model recomputes all of it and saves no memory.
    """
    train = config.train
    if train.activation_checkpointing:
        needed_for, alternative = "train.activation_checkpointing=true", "train.activation_checkpointing=false"
        blocks = find_blocks(model, config.fsdp.wrap, needed_for=needed_for, alternative=alternative)
        return [block for _, block in blocks]
    return [block for _, block in find_units(model, config.fsdp.wrap)] or [model] if train.compile else []
