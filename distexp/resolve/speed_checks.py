"""Checks of the options of speed: compilation, the format of convolutions, the cast of weights, and their update.

Each one needs the support of the strategy and of the trainer, and some need a precision, a task or a device.
"""

from __future__ import annotations

from collections.abc import Iterator

from distexp.config import Config
from distexp.config.size_checks import several_lengths
from distexp.strategies.base import load_strategy
from distexp.strategies.fast import fused_update_error

WHOLE_MODEL = ("model", "graphs")
"""Values of ``train.compile`` that compile the whole model."""


def check_speed_options(config: Config) -> Iterator[str]:
    """Yield an error for each option of speed that the strategy, the trainer, the precision or the device lacks."""
    yield from _compile_errors(config)
    yield from _channels_last_errors(config)
    yield from _activation_budget_errors(config)
    yield from _compute_weights_errors(config)
    yield from _fused_update_errors(config)


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


def _activation_budget_errors(config: Config) -> Iterator[str]:
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


def _fused_update_errors(config: Config) -> Iterator[str]:
    if not config.train.fused_update:
        return
    if setting := _unsupported_by(config, strategy_supports=load_strategy(config).fuses_update):
        yield f"train.fused_update=true is not supported by {setting}: leave it out"
    elif reason := fused_update_error(config):
        yield f"train.fused_update=true {reason}"


def _unsupported_by(config: Config, *, strategy_supports: bool) -> str | None:
    """Return the setting because of which an option is not supported; None if it is.

    Args:
        config: the configuration.
        strategy_supports: whether the strategy supports the option. Of the trainers, only the native one does.
    """
    if config.engine.name != "native":
        return f"engine={config.engine.name}"
    return None if strategy_supports else f"strategy={config.strategy.name}"
