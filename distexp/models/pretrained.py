"""Configurations and weights of Hugging Face models, by hub id or from a folder of save_pretrained."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from distexp.config import ConfigError
from distexp.system.hub import offline_if_unreachable


def read_config(key: str, source: str) -> Any:
    """The configuration at ``source``.

    Args:
        key: the key that names the source, for the sentences: model.name or model.path.
        source: a hub id or a folder.

    Raises:
        ConfigError: there is none that transformers knows.
    """
    from transformers import AutoConfig

    offline_if_unreachable(source)
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(_not_read(key, source, "a model's config.json", error)) from error


def read_weights(model_class: Any, key: str, source: str, config: Any) -> nn.Module:
    """A model with the weights at ``source``, in fp32.

    Args:
        model_class: anything with ``from_pretrained``.
        key: the key that names the source, for the sentences.
        source: a hub id or a folder.
        config: what the model is built from; see ``read_config``.

    Raises:
        ConfigError: weights are absent, damaged, incomplete or of other shapes.
    """
    from safetensors import SafetensorError
    from transformers.utils import logging

    offline_if_unreachable(source)
    logging.disable_progress_bar()  # a bar in a log is a thousand lines
    try:
        model, found = model_class.from_pretrained(
            source, config=config, dtype=torch.float32, ignore_mismatched_sizes=True, output_loading_info=True
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(_not_read(key, source, "a model's weights", error)) from error
    # transformers would draw these at random and go on.
    lacking = sorted({*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])})
    if lacking:
        more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        raise ConfigError(
            f"{key}={source} lacks weights of {type(model).__name__}, or has them in another shape: "
            f"{', '.join(lacking[:3])}{more}: give a causal LM that is whole, or set model.init=random"
        )
    built: nn.Module = model.train()  # from_pretrained leaves it in evaluation mode
    return built


def on_meta_device() -> bool:
    """Whether tensors are being made on the meta device, where weights are neither read nor drawn."""
    return torch.empty(0).device.type == "meta"


def _not_read(key: str, source: str, what: str, error: Exception) -> str:
    reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(". ")
    return (
        f"{key}={source} is neither a folder with {what}, nor in the local cache, nor could it be had from the "
        f"hub ({reason}): correct it, or set a local folder"
    )
