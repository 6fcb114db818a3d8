"""The group ``kernels``: options of speed that the user left open, and their checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from distexp.config import WHOLE_MODEL, Config, ConfigError
from distexp.config.custom_code import check_returned, shorten_errors
from distexp.config.fields import info_of
from distexp.config.keys import get_value, schema_fields, set_value, speed_references
from distexp.config.model_checks import ATTENTIONS, several_lengths
from distexp.resolve.resources import MAX_CPU_BYTES, estimate_image_bytes
from distexp.strategies.base import fused_update_error, load_strategy

MIN_FLEX_WIDTH = 16
"""Smallest width of an attention head for which flex attention has a GPU kernel."""

MAX_GPU_BYTES = 4 * 10**9
"""Decoded images that ``dataset.cache`` keeps on the GPU. TinyImageNet has 1.35 GB."""

MODELS = "distexp.models."
"""Models below this package can compute the logits of targets alone."""


def choose_kernels(config: Config) -> None:
    """Set the keys that are null: to what ``fast`` chooses, or else to the reference."""
    chosen = fast_values(config) if config.kernels.name == "fast" else {}
    for key, reference in speed_references().items():
        if get_value(config, key) is None:
            set_value(config, key, chosen.get(key, reference))
    if config.kernels.name == "fast" and config.model.attention == "auto":
        config.model.attention = _attention(config)


def fast_values(config: Config) -> Mapping[str, Any]:
    """Return the fast values of model and strategy, by key. Other keys keep their reference."""
    strategy, target = load_strategy(config), config.strategy._target_
    source = f"strategy._target_={target}: fast_values()"
    with shorten_errors(target, "fast_values()"):
        values = strategy.fast_values(config)
    check_returned(values, Mapping, source)
    allowed, infos, errors = speed_references(), {key: info_of(spec) for key, spec in schema_fields()}, []
    for key, value in values.items():
        if key not in allowed:
            errors.append(f"{source} returned {key}, which is not a key of kernels=fast: use {', '.join(allowed)}")
        elif reason := infos[key].find_error(value):
            errors.append(f"{source} returned {key}={value}, which {reason}")
    if errors:
        raise ConfigError(errors)
    return {**_model_values(config), **_image_values(config), **values}


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


# Checks of the options of speed: compilation, the format of convolutions, the cast of weights, and their update. Each
# one needs the support of the strategy and of the trainer, and some need a precision, a task or a device.


def check_speed_options(config: Config) -> Iterator[str]:
    """Yield an error for each option of speed that the strategy, the trainer, the precision or the device lacks."""
    yield from _compile_errors(config)
    yield from _channels_last_errors(config)
    train = config.train
    if train.compiled == "none" and train.activation_budget is not None:
        yield (
            f"train.activation_budget={train.activation_budget:g} is for compiled graphs, but train.compile=false: use "
            "train.compile=blocks, or train.activation_checkpointing=true in its place"
        )
    elif config.model.dropout and train.activation_budget is not None and train.activation_budget < 1:
        yield (
            f"train.activation_budget={train.activation_budget:g} gives wrong gradients with model.dropout="
            f"{config.model.dropout:g}: use train.activation_checkpointing=true in its place, or model.dropout=0"
        )
    yield from _compute_weights_errors(config)
    if not config.train.fused_update:
        return
    if setting := _unsupported_by(config, strategy_supports=load_strategy(config).fuses_update):
        yield f"train.fused_update=true is not supported by {setting}: leave it out"
    elif reason := fused_update_error(config):
        yield f"train.fused_update=true {reason}"


def _compile_errors(config: Config) -> Iterator[str]:
    scope = config.train.compiled
    if scope not in WHOLE_MODEL:
        return
    if setting := _unsupported_by(config, strategy_supports=scope in load_strategy(config).compile_scopes):
        yield f"train.compile={scope} is not supported by {setting}: use train.compile=blocks"
    if several := several_lengths(config.dataset):
        yield (
            f"train.compile={scope} needs batches of one length, but {several} makes many: leave it out, or use "
            "train.compile=blocks"
        )
    if scope == "graphs" and config.cluster.device == "cpu":
        yield "train.compile=graphs needs a GPU, but this run is on cpu: use train.compile=model"


def _channels_last_errors(config: Config) -> Iterator[str]:
    if not config.train.channels_last:
        return
    if config.model.task != "image_classification":
        yield (
            f"train.channels_last=true is for image_classification, but model={config.model.name} is for "
            f"{config.model.task}: leave it out"
        )
    elif setting := _unsupported_by(config, strategy_supports=load_strategy(config).keeps_channels_last):
        yield f"train.channels_last=true is not supported by {setting}: leave it out"


def _compute_weights_errors(config: Config) -> Iterator[str]:
    if config.train.compute_weights != "step":
        return
    if config.precision.name != "bf16":
        yield (
            f"train.compute_weights=step is for precision=bf16, but this run has precision={config.precision.name}: "
            "use precision=bf16, or leave it out"
        )
    if setting := _unsupported_by(config, strategy_supports=load_strategy(config).casts_once_per_step):
        yield f"train.compute_weights=step is not supported by {setting}: leave it out"


def _unsupported_by(config: Config, *, strategy_supports: bool) -> str | None:
    """Return the setting because of which an option is not supported; None if it is."""
    if config.engine.name != "native":
        return f"engine={config.engine.name}"
    return None if strategy_supports else f"strategy={config.strategy.name}"
