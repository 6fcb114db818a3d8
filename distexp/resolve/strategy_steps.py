"""Steps that call the chosen strategy and trainer, which may be custom classes."""

from __future__ import annotations

from typing import Any

from distexp.config import Config, ConfigError
from distexp.config.custom_code import check_returned, shorten_errors
from distexp.engines.base import load_trainer
from distexp.strategies.base import COMMUNICATION, load_strategy


def set_strategy_defaults(config: Config) -> list[str]:
    """Let the strategy set the options that the user left open. Return no errors."""
    strategy = load_strategy(config)
    with shorten_errors(config.strategy._target_, "set_defaults()"):
        strategy.set_defaults(config)
    return []


def check_strategy(config: Config) -> list[str]:
    """Return an error for each thing that the strategy cannot do."""
    strategy = load_strategy(config)
    with shorten_errors(config.strategy._target_, "main_option()"):
        option = strategy.main_option(config)  # shown while the run trains, so an error would appear only then
    check_returned(option, str, f"strategy._target_={config.strategy._target_}: main_option()")
    with shorten_errors(config.strategy._target_, "validate()"):
        return _checked_messages(strategy.validate(config), config.strategy._target_)


def check_trainer(config: Config) -> list[str]:
    """Return an error for each thing that the trainer cannot do."""
    trainer = load_trainer(config)
    with shorten_errors(config.engine._target_, "validate()"):
        return _checked_messages(trainer.validate(config), config.engine._target_)


def needs_one_worker(config: Config) -> bool:
    """Return whether the strategy cannot use more than one worker."""
    return COMMUNICATION not in load_strategy(config).requires


def _checked_messages(returned: Any, target: str) -> list[str]:
    """Return what ``validate`` of a custom class returned, if it is a list of messages.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(returned, list) and all(isinstance(message, str) for message in returned):
        return returned
    raise ConfigError(
        f"{target}: validate() returned {returned!r}: return a list of messages, empty if all is supported"
    )
