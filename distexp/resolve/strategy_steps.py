"""Steps that ask the chosen strategy and trainer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from distexp.config import Config, ConfigError
from distexp.config.custom_code import check_returned, one_sentence
from distexp.config.size_checks import several_lengths
from distexp.engines.base import load_trainer
from distexp.strategies.base import COMMUNICATION, load_strategy

WHOLE_MODEL = ("model", "graphs")
"""Values of ``train.compile`` that compile the whole model."""


def set_strategy_defaults(config: Config) -> Iterator[str]:
    """Let the strategy set the options that the user left open."""
    strategy = load_strategy(config)
    with one_sentence(config.strategy._target_, "set_defaults()"):
        strategy.set_defaults(config)
    yield from ()


def check_strategy(config: Config) -> list[str]:
    """Return an error for each thing that the strategy cannot do."""
    strategy = load_strategy(config)
    with one_sentence(config.strategy._target_, "main_option()"):
        option = strategy.main_option(config)  # the screen shows it
    check_returned(option, str, f"strategy._target_={config.strategy._target_}: main_option()")
    with one_sentence(config.strategy._target_, "validate()"):
        return _as_messages(strategy.validate(config), config.strategy._target_)


def check_speed_options(config: Config) -> Iterator[str]:
    """Yield an error for each option of speed that the strategy, the trainer, the precision or the device lacks."""
    strategy, train = load_strategy(config), config.train
    scope = train.compiled
    if scope in WHOLE_MODEL:
        native = config.engine.name == "native"
        if scope not in strategy.compile_scopes or not native:
            owner = f"strategy={config.strategy.name}" if native else f"engine={config.engine.name}"
            yield f"train.compile={scope} is not supported by {owner}: use train.compile=blocks"
        if several := several_lengths(config.dataset):
            yield (
                f"train.compile={scope} needs batches of one length, but {several} makes many: leave it out, or use "
                "train.compile=blocks"
            )
    yield from _channels_last_errors(config)
    if scope == "graphs" and config.cluster.device == "cpu":
        yield "train.compile=graphs needs a GPU, but this run is on cpu: use train.compile=model"
    if scope == "none" and train.activation_budget is not None:
        yield (
            f"train.activation_budget={train.activation_budget:g} is for compiled graphs, but train.compile=false: use "
            "train.compile=blocks, or train.activation_checkpointing=true in its place"
        )
    if train.compute_weights != "step":
        return
    if config.precision.name != "bf16":
        yield (
            f"train.compute_weights=step is for precision=bf16, but this run has precision={config.precision.name}: "
            "use precision=bf16, or leave it out"
        )
    if not strategy.casts_once_per_step or config.engine.name != "native":
        owner = f"strategy={config.strategy.name}" if config.engine.name == "native" else f"engine={config.engine.name}"
        yield f"train.compute_weights=step is not supported by {owner}: leave it out"


def _channels_last_errors(config: Config) -> Iterator[str]:
    if not config.train.channels_last:
        return
    if config.model.task != "image_classification":
        yield (
            f"train.channels_last=true is for image_classification, but model={config.model.name} is for "
            f"{config.model.task}: leave it out"
        )
    elif not load_strategy(config).keeps_channels_last or config.engine.name != "native":
        owner = f"strategy={config.strategy.name}" if config.engine.name == "native" else f"engine={config.engine.name}"
        yield f"train.channels_last=true is not supported by {owner}: leave it out"


def check_trainer(config: Config) -> list[str]:
    """Return an error for each thing that the trainer cannot do."""
    trainer = load_trainer(config)
    with one_sentence(config.engine._target_, "validate()"):
        return _as_messages(trainer.validate(config), config.engine._target_)


def needs_one_worker(config: Config) -> bool:
    """Return whether the strategy cannot use more than one worker."""
    return COMMUNICATION not in load_strategy(config).requires


def _as_messages(returned: Any, target: str) -> list[str]:
    """Return what ``validate`` returned.

    Raises:
        ConfigError: it is no list of messages.
    """
    if isinstance(returned, list) and all(isinstance(message, str) for message in returned):
        return returned
    raise ConfigError(
        f"{target}: validate() returned {returned!r}: return a list of messages, empty if all is supported"
    )
