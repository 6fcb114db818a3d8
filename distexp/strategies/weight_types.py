"""Strategies that compute with weights in 16 bits, and models whose buffers in fp32 do not fit them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from distexp.config import Config, ConfigError
from distexp.strategies.ds_initialization import in_16_bits

OTHER_TYPES = re.compile(r"same dtype|mixed dtype|expected scalar type|should be the same")
"""In the messages of torch about operands of different types."""


def wrapper_casts_weights(config: Config) -> bool:
    """Return whether FSDP or DeepSpeed casts the weights to 16 bits, in place of autocast or copies."""
    if config.strategy.name == "deepspeed":
        return in_16_bits(config)
    return config.strategy.name == "fsdp" and config.precision.name != "fp32"


@contextmanager
def explained_buffer_types(model: nn.Module, config: Config) -> Iterator[None]:
    """Raise ConfigError if an operand has another type than the cast weights, and the model has buffers in fp32.

    FSDP, DeepSpeed and ``train.compute_weights=step`` cast weights only. A buffer in fp32 that the model adds to
    activations makes these fp32, and the next layer refuses them.
    """
    try:
        yield
    except RuntimeError as error:
        casts = wrapper_casts_weights(config) or config.train.compute_weights == "step"
        names = [name for name, buffer in model.named_buffers() if buffer.dtype == torch.float32]
        if not casts or not names or not OTHER_TYPES.search(str(error)):
            raise
        shown = ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
        raise ConfigError(
            f"the weights are cast to {config.precision.name}, but not the buffers of the model ({shown}), and torch "
            f"refuses to combine them: {str(error).splitlines()[0]}. In forward, cast a buffer to the type of the "
            "activations, as in x + self.table.to(x.dtype). Or choose precision=fp32, or autocast: strategy=ddp "
            "train.compute_weights=autocast"
        ) from error
