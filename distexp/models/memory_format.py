"""Memory format of convolution weights, for ``train.channels_last``."""

from __future__ import annotations

import torch
from torch import nn

from distexp.config import Config

CONVOLUTION_AXES = 4


def set_memory_format(model: nn.Module, config: Config) -> None:
    """Convert the weights of convolutions to channels-last, if ``train.channels_last=true``.

    Images are channels-last. A convolution of images and weights in different formats may have to copy the weights.
    """
    if config.train.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # changes 4-dimensional tensors only


def read_memory_format(model: nn.Module) -> bool | None:
    """Return whether the weights of convolutions are channels-last; None if the model has none on this worker."""
    weights = [parameter for parameter in model.parameters() if parameter.dim() == CONVOLUTION_AXES]
    # With one pixel, as with one channel, both formats are the same.
    distinct = [weight for weight in weights if weight.shape[1] > 1 and weight.shape[2:].numel() > 1]
    return all(weight.is_contiguous(memory_format=torch.channels_last) for weight in distinct) if distinct else None
