"""Steps that ask the chosen strategy and trainer."""

from __future__ import annotations

from collections.abc import Iterator

from distexp.config import Config
from distexp.engines.base import load_trainer
from distexp.strategies.base import COMMUNICATION, load_strategy


def set_strategy_defaults(config: Config) -> Iterator[str]:
    """Let the strategy set the options that the user left open."""
    load_strategy(config).set_defaults(config)
    yield from ()


def check_strategy(config: Config) -> list[str]:
    """Return an error for each thing that the strategy cannot do."""
    return load_strategy(config).validate(config)


def check_trainer(config: Config) -> list[str]:
    """Return an error for each thing that the trainer cannot do."""
    return load_trainer(config).validate(config)


def needs_one_worker(config: Config) -> bool:
    """Return whether the strategy cannot use more than one worker."""
    return COMMUNICATION not in load_strategy(config).requires
