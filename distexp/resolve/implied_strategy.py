"""Config groups that imply a strategy, such as ``sharding``: their YAML files override ``/strategy``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from omegaconf import OmegaConf

from distexp.config import Config
from distexp.config.paths import conf_dir

Choices = Mapping[str, str | None]
"""The chosen option of each config group."""

OVERRIDE = "override /strategy"


def check_implied_strategy(config: Config, choices: Choices) -> Iterator[str]:
    """Yield an error for each chosen option that implies another strategy than the chosen one."""
    for group, option in choices.items():
        implied = implied_strategy(group, option) if option is not None else None
        if implied not in (None, config.strategy.name):
            yield (
                f"{group}={option} needs strategy={implied}, but this run has strategy={config.strategy.name}: "
                f"leave {group} out, or choose strategy={implied}"
            )


@lru_cache(maxsize=256)
def implied_strategy(group: str, option: str) -> str | None:
    """Return the strategy that an option implies, None if it implies none.

    A preset only suggests a strategy: the command line may choose another one.
    """
    path = conf_dir() / group / f"{option}.yaml"
    if group == "experiment" or not path.is_file():
        return None
    content: Any = OmegaConf.load(path)
    for entry in content.get("defaults", []):
        if OmegaConf.is_dict(entry) and OVERRIDE in entry:
            return str(entry[OVERRIDE])
    return None
