"""Changes to a model's blocks that every strategy takes alike, made before it is distributed."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from distexp.config import Config
from distexp.models.introspection import find_blocks


def transform(model: nn.Module, config: Config) -> None:
    """Recomputes and compiles blocks, as the configuration asks.

    Only a block's ``forward`` is replaced: names and parameters stay, and the hooks by which FSDP and
    ZeRO gather parameters stay outside of what is recomputed or traced.
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
