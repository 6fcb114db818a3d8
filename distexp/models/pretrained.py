"""Readers of configurations and weights of Hugging Face models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from distexp.config import ConfigError
from distexp.system.hub import offline_if_unreachable
from distexp.system.restricted_loading import refused_as_config_error


def read_config(key: str, source: str) -> Any:
    """Read the configuration of a model.

    Args:
        key: key that has the source, for messages: model.name or model.path.
        source: a hub id, or a folder written by ``save_pretrained``.

    Raises:
        ConfigError: there is no configuration, or transformers does not support it.
    """
    from transformers import AutoConfig

    offline_if_unreachable(source)
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(_read_error(key, source, "a model's config.json", error)) from error


def read_weights(model_class: Any, key: str, source: str, config: Any) -> nn.Module:
    """Build a model with pretrained weights, in fp32 and in training mode.

    Args:
        model_class: class with a method ``from_pretrained``.
        key: key that has the source, for messages.
        source: a hub id, or a folder written by ``save_pretrained``.
        config: configuration of the model, from ``read_config``.

    Raises:
        ConfigError: weights are missing or damaged, have other shapes, or contain code.
    """
    from safetensors import SafetensorError
    from transformers.utils import logging

    offline_if_unreachable(source)
    logging.disable_progress_bar()  # each update would be a line in the log
    try:
        with refused_as_config_error(Path(source)):  # transformers reads pytorch_model.bin with weights_only
            model, info = model_class.from_pretrained(
                source, config=config, dtype=torch.float32, ignore_mismatched_sizes=True, output_loading_info=True
            )
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(_read_error(key, source, "a model's weights", error)) from error
    # transformers would initialize these at random and continue.
    missing = sorted({*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])})
    if missing:
        raise ConfigError(_missing_weights_error(key, source, type(model).__name__, missing))
    built: nn.Module = model.train()  # from_pretrained leaves it in evaluation mode
    return built


def on_meta_device() -> bool:
    """Return whether torch's default device is meta, so that weights need not be read."""
    return torch.empty(0).device.type == "meta"


def _missing_weights_error(key: str, source: str, model_class: str, missing: list[str]) -> str:
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return (
        f"{key}={source} lacks weights of {model_class}, or they have another shape: "
        f"{', '.join(missing[:3])}{more}: use the complete weights of a causal LM, or model.init=random"
    )


def _read_error(key: str, source: str, what: str, error: Exception) -> str:
    reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(". ")
    return (
        f"{key}={source} is neither a folder with {what} nor available from the local cache or the hub "
        f"({reason}): correct {key}, or set it to a local folder"
    )
