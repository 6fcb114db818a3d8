"""The Trainer protocol of the config group ``engine``. To add one, add a file here and a YAML in conf/engine.

The launcher asks a trainer for errors. It has no torch, so a trainer imports torch only inside ``train``.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from distexp.config import Config, ConfigError
from distexp.config.custom_code import PAGE, check_members, check_returned, locate, shorten_errors
from distexp.distributed.context import Context
from distexp.runs.record_sections import Built
from distexp.strategies.base import EvaluableModel
from distexp.training.inputs import ModelFactory, TrainingInputs


class Trainer(Protocol):
    """A training loop that distributes a model with the chosen strategy and trains it."""

    def validate(self, config: Config) -> list[str]:
        """Return a message for each setting that this trainer does not support."""

    def train(
        self, build_model: ModelFactory, config: Config, context: Context, inputs: TrainingInputs
    ) -> tuple[EvaluableModel, Built]:
        """Train until the end of the plan; return the trained model, and what was built.

        Keep no reference to the blueprint that ``build_model`` returns, because that of rank 0 holds all weights in
        host memory. Raise RuntimeError before the first step if the strategy expects something else than what was
        built.
        """


def load_trainer(config: Config) -> Trainer:
    """Return the trainer of a configuration. Raises ConfigError if ``engine._target_`` is no Trainer."""
    target = config.engine._target_
    kind = locate(target)
    with shorten_errors(target, "the constructor"):
        trainer: Trainer = kind()
    check_members(trainer, Trainer, f"engine._target_={target}")
    return trainer


def check_built(built: Built, expected: Mapping[str, Any]) -> None:
    """Raise RuntimeError if what was built differs from the requested configuration."""
    check_returned(built, Built, "describe() of the distributed model")
    check_returned(expected, Mapping, "expected_build() of the strategy")
    if unknown := sorted(expected.keys() - vars(built).keys()):
        raise ConfigError(
            f"expected_build() of the strategy has {', '.join(unknown)}, which record.json lacks in built: use its "
            f"fields, such as wrapper, as in {PAGE}"
        )
    found = ((name, getattr(built, name), value) for name, value in expected.items())
    if wrong := [f"{name} is {actual!r}, not {value!r}" for name, actual, value in found if actual != value]:
        raise RuntimeError("the model was not built as requested: " + "; ".join(wrong))
