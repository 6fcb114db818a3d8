"""Values that ``kernels=fast`` chooses for keys of speed, and the checks of these keys."""

from collections.abc import Iterator, Mapping
from typing import Any

from distexp.config import WHOLE_MODEL, Command, Config, ConfigError
from distexp.config.custom_code import check_returned, shorten_errors
from distexp.config.fields import info_of
from distexp.config.keys import get_value, schema_fields, set_value, speed_references
from distexp.config.model_checks import ATTENTIONS, several_lengths
from distexp.resolve.resources import MAX_CPU_BYTES, estimate_image_bytes
from distexp.strategies.base import fused_update_error, load_strategy
from distexp.strategies.parallel.checks import needed_attention, unshared

MAX_GPU_BYTES = 4 * 10**9
"""Decoded images that ``dataset.cache`` keeps on the GPU. TinyImageNet has 1.35 GB."""

NO_SELECTIVE = "train.activation_checkpointing=selective is not supported by train.compile"
BUDGET = "train.activation_budget=0.5 train.activation_checkpointing=false"


def choose_kernels(config: Config) -> None:
    """Set the keys that are null: to what ``fast`` chooses, or else to the reference."""
    chosen = fast_values(config) if config.kernels.name == "fast" else {}
    is_typed = config.train.compile is not None
    for key, reference in speed_references().items():
        if get_value(config, key) is None:
            set_value(config, key, chosen.get(key, reference))
    config.kernels.compile = None if is_typed or not config.train.compile else config.train.compiled
    if config.model.attention == "auto":
        fast = _attention(config) if config.kernels.name == "fast" else "auto"
        config.model.attention = needed_attention(config) or fast


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
    chosen = {**_model_values(config), **_image_values(config), **values}
    if config.train.activation_checkpointing == "offload" and chosen.get("train.compile") in WHOLE_MODEL:
        chosen["train.compile"] = "blocks"
    chosen = {key: value for key, value in chosen.items() if key not in unshared(config)}
    if config.train.activation_checkpointing == "selective":
        compiled = chosen.pop("train.compile", False)
        if compiled and config.train.compile is None:
            config.kernels.compile_note = f"{NO_SELECTIVE}: {BUDGET} is faster"
    return chosen


def _attention(config: Config) -> str:
    """Return the attention for ``model.attention=auto``: flex attention, if the model and the device support it.

    A CPU has no fast attention, but packed rows need SDPA there.
    """
    model = config.model
    if model._target_ not in ATTENTIONS:
        return "auto"
    if config.cluster.device != "cuda":
        return "sdpa" if config.dataset.packing else "auto"
    if config.parallel.copies > 1 or config.train.activation_checkpointing == "selective":
        return "sdpa"
    width = (model.hidden_size or 0) // (model.num_heads or 1)
    return "flex" if width >= 16 and not model.dropout else "sdpa"  # There is no GPU kernel for narrower heads.


def _image_values(config: Config) -> Mapping[str, Any]:
    """Return the memory for the images of a training on GPUs: that of the GPU, if they take a small part of it."""
    if "cache" not in config.dataset.keys or config.cluster.device != "cuda":
        return {}
    needed = estimate_image_bytes(config.dataset)
    if needed is None or needed > MAX_CPU_BYTES:
        return {}
    return {"dataset.cache": "gpu" if needed <= MAX_GPU_BYTES else "cpu"}


def _model_values(config: Config) -> Mapping[str, Any]:
    if not config.model.traits.is_causal or not config.model._target_.startswith("distexp.models."):
        return {}
    # Other models may need all logits. Their fp32 copy is the largest tensor, and limits the micro-batch.
    return {"train.loss": "chunked"} if config.train.logits == "all" else {"train.logits": "targets"}


def check_speed_options(config: Config) -> Iterator[str]:
    """Yield an error for each option of speed that the strategy, the trainer, the precision or the device lacks."""
    yield from _compile_errors(config)
    yield from _selective_errors(config)
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
    yield from _optimizer_errors(config)
    if not config.train.fused_update:
        return
    if setting := _unsupported_by(config, strategy_supports=load_strategy(config).fuses_update):
        yield f"train.fused_update=true is not supported by {setting}: leave it out"
    elif reason := fused_update_error(config):
        yield f"train.fused_update=true {reason}"


def _selective_errors(config: Config) -> Iterator[str]:
    """Yield an error for each setting with which torch cannot store a part of what a block computes."""
    if config.train.activation_checkpointing != "selective":
        return
    alone = "train.activation_checkpointing=true"
    if config.train.compiled != "none":
        yield f"{NO_SELECTIVE}: use train.compile=false, or {BUDGET}"
    if config.engine.name != "native":
        yield (
            f"train.activation_checkpointing=selective is not supported by engine={config.engine.name}: use "
            f"engine=native, or {alone}"
        )
    if config.model.attention == "flex":
        yield f"model.attention=flex has no selective recomputation: use model.attention=sdpa, or {alone}"
    if config.model.dropout:  # An attention that is not recomputed draws no numbers, so those after it would differ.
        yield (
            f"train.activation_checkpointing=selective gives wrong gradients with model.dropout="
            f"{config.model.dropout:g}: use {alone}, or model.dropout=0"
        )


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
    if not config.model.traits.is_image:
        yield (
            f"train.channels_last=true is for image_classification, but model={config.model.name} is for "
            f"{config.model.task}: leave it out"
        )
    elif setting := _unsupported_by(config, strategy_supports=load_strategy(config).keeps_channels_last):
        yield f"train.channels_last=true is not supported by {setting}: leave it out"


def _compute_weights_errors(config: Config) -> Iterator[str]:
    if config.train.compute_weights != "step":
        return
    if config.precision.outside_products != "bf16":
        yield (
            f"train.compute_weights=step is for precision=bf16, but this run has precision={config.precision.name}: "
            "use precision=bf16, or leave it out"
        )
    if setting := _unsupported_by(config, strategy_supports=load_strategy(config).casts_once_per_step):
        yield f"train.compute_weights=step is not supported by {setting}: leave it out"


def _optimizer_errors(config: Config) -> Iterator[str]:
    if config.train.optimizer != "muon":
        return
    if setting := _unsupported_by(config, strategy_supports=load_strategy(config).gives_whole_matrices):
        yield (
            f"train.optimizer=muon needs whole matrices, which the optimizer does not get from {setting}: use "
            f"{'engine=native' if config.engine.name != 'native' else 'strategy=ddp or fsdp'}, or train.optimizer=adamw"
        )
    elif config.command == Command.VERIFY:
        yield (
            "train.optimizer=muon cannot be compared weight by weight, because it amplifies the rounding of its "
            "gradients in bf16: add train.optimizer=adamw, and compare the losses of trainings with Muon"
        )
    elif config.offload.enabled:
        yield (
            "train.optimizer=muon is not supported with offload=true, because its matrix products take too long on a "
            "CPU: leave one of them out"
        )


def _unsupported_by(config: Config, *, strategy_supports: bool) -> str | None:
    """Return the setting because of which an option is not supported; None if it is."""
    if config.engine.name != "native":
        return f"engine={config.engine.name}"
    return None if strategy_supports else f"strategy={config.strategy.name}"
