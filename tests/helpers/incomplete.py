"""Custom classes and functions that lack something or raise, used as ``_target_=tests.helpers.incomplete.NAME``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import nn

from distexp.config import Config
from distexp.data.base import TaskData
from distexp.data.text import TextCollate
from distexp.strategies.base import Strategy
from distexp.strategies.ddp import DDP


class NoSetup(Strategy):
    """A strategy without ``setup``."""

    def expected_build(self, config: Config) -> Mapping[str, Any]:
        """Return nothing to check."""
        return {}


class NotDerived:
    """A strategy that is not derived from the base class."""


class RaisingValidate(DDP):
    """A strategy whose check raises an error of two lines."""

    def validate(self, config: Config) -> list[str]:
        """Raise."""
        raise KeyError("bucket\nsecond line")


class RaisingDefaults(DDP):
    """A strategy whose defaults raise an error."""

    def set_defaults(self, config: Config) -> None:
        """Raise."""
        raise ZeroDivisionError


class RaisingOption(DDP):
    """A strategy whose description raises an error."""

    def main_option(self, config: Config) -> str:
        """Raise."""
        raise RuntimeError("no option")


class RaisingConstructor(DDP):
    """A strategy that cannot be created."""

    def __init__(self) -> None:
        raise OSError("no license")


class ReturnsText(DDP):
    """A strategy whose check returns a text and not a list."""

    def validate(self, config: Config) -> Any:
        """Return a text."""
        return "not supported"


class ReturnsNoOption(DDP):
    """A strategy whose main option is None."""

    def main_option(self, config: Config) -> Any:
        """Return nothing."""
        return None


class ReturnsModule(DDP):
    """A strategy whose ``setup`` returns a plain module."""

    def setup(self, blueprint: Any, config: Config, context: Any) -> Any:
        """Return no DistributedModel."""
        return nn.Linear(1, 1)


class NoTrain:
    """A trainer without ``train``."""

    def validate(self, config: Config) -> list[str]:
        """Accept everything."""
        return []


class NoForward(nn.Module):
    """A module without ``forward``."""


NUMBER = 3
"""An object that cannot be called."""


def return_none(*arguments: Any) -> Any:
    """Return nothing."""
    return None


def return_class(*arguments: Any) -> Any:
    """Return a class and no object of it."""
    return NoTrain


def build_text(model: Any, num_classes: int) -> Any:
    """Return no module."""
    return "model"


def build_no_forward(model: Any, num_classes: int) -> nn.Module:
    """Return a module without ``forward``."""
    return NoForward()


def load_list(dataset: Any, model: Any, seed: int) -> Any:
    """Return no TaskData."""
    return []


def load_numpy_classes(dataset: Any, model: Any, seed: int) -> Any:
    """Return a TaskData whose number of classes is computed from labels by NumPy."""
    number: Any = np.array([0, 6]).max() + 1
    return TaskData("causal_lm", [{}], [{}], lambda samples: samples, number)  # type: ignore[arg-type, return-value]


def load_other_targets(dataset: Any, model: Any, seed: int) -> Any:
    """Return a TaskData whose collate function counts the targets of another task."""
    return TaskData("causal_lm", [{}], [{}], TextCollate(0, 8, task="masked_lm"), 3)  # type: ignore[arg-type, list-item]


def load_wrong_fields(dataset: Any, model: Any, seed: int) -> Any:
    """Return a TaskData with a wrong value in each field."""
    nothing: Any = None
    return TaskData("image_classification", nothing, (index for index in range(3)), "collate", nothing)  # type: ignore[arg-type]
