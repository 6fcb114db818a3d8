"""The group ``kernels``: options of speed that the user left open.

Each of these keys has a ``reference`` in the schema, and null as its default. The strategy proposes the values of
``kernels=fast``, because they depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distexp.config import Config, ConfigError
from distexp.config.custom_code import check_returned, shorten_errors
from distexp.config.field_info import info_of
from distexp.config.key_info import get_value, schema_fields, set_value, speed_references
from distexp.config.model_checks import ATTENTIONS
from distexp.resolve.image_bytes import MAX_CPU_BYTES, estimate_image_bytes
from distexp.strategies.base import load_strategy

MIN_FLEX_WIDTH = 16
"""Smallest width of an attention head for which flex attention has a GPU kernel."""

MAX_GPU_BYTES = 4 * 10**9
"""Decoded images that ``dataset.cache`` keeps on the GPU. TinyImageNet has 1.35 GB."""

MODELS = "distexp.models."
"""Models below this package can compute the logits of targets alone."""


def choose_kernels(config: Config) -> list[str]:
    """Set the keys that are null: to what ``fast`` chooses, or else to the reference. Return no errors."""
    chosen = fast_values(config) if config.kernels.name == "fast" else {}
    for key, reference in speed_references().items():
        if get_value(config, key) is None:
            set_value(config, key, chosen.get(key, reference))
    if config.kernels.name == "fast" and config.model.attention == "auto":
        config.model.attention = _attention(config)
    return []


def fast_values(config: Config) -> Mapping[str, Any]:
    """Return the fast values of model and strategy, by key. Other keys keep their reference."""
    strategy, target = load_strategy(config), config.strategy._target_
    with shorten_errors(target, "fast_values()"):
        values = strategy.fast_values(config)
    check_returned(values, Mapping, f"strategy._target_={target}: fast_values()")
    _check_fast_values(values, target)
    return {**_model_values(config), **_image_values(config), **values}


def _check_fast_values(values: Mapping[str, Any], target: str) -> None:
    """Check what a custom strategy returned.

    Raises:
        ConfigError: with each key that the group does not have, and each value that a key does not accept.
    """
    allowed = speed_references()
    infos = {key: info_of(spec) for key, spec in schema_fields()}
    source = f"strategy._target_={target}: fast_values()"
    errors = []
    for key, value in values.items():
        if key not in allowed:
            errors.append(f"{source} returned {key}, which is not a key of kernels=fast: use {', '.join(allowed)}")
        elif reason := infos[key].find_error(value):
            errors.append(f"{source} returned {key}={value}, which {reason}")
    if errors:
        raise ConfigError(errors)


def _attention(config: Config) -> str:
    """Return the attention for ``model.attention=auto``: flex attention, if the model and the device support it.

    A CPU has no fast attention, but packed rows need SDPA there.
    """
    model = config.model
    if model._target_ not in ATTENTIONS:
        return "auto"
    if config.cluster.device != "cuda":
        return "sdpa" if config.dataset.packing else "auto"
    width = (model.hidden_size or 0) // (model.num_heads or 1)
    return "flex" if width >= MIN_FLEX_WIDTH and not model.dropout else "sdpa"


def _image_values(config: Config) -> Mapping[str, Any]:
    """Return the memory for the images of a training on GPUs: that of the GPU, if they take a small part of it."""
    if "cache" not in config.dataset.keys or config.cluster.device != "cuda":
        return {}
    needed = estimate_image_bytes(config.dataset)
    if needed is None or needed > MAX_CPU_BYTES:
        return {}
    return {"dataset.cache": "gpu" if needed <= MAX_GPU_BYTES else "cpu"}


def _model_values(config: Config) -> Mapping[str, Any]:
    if config.model.task != "causal_lm" or not config.model._target_.startswith(MODELS):
        return {}
    # With all logits, their fp32 copy is the largest tensor, and it limits the micro-batch.
    return {"train.loss": "chunked"} if config.train.logits == "all" else {"train.logits": "targets"}
