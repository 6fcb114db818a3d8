"""The steps from a composed configuration to one that can run, in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from omegaconf import DictConfig

from distexp.config import Config, ConfigError
from distexp.config.value_checks import check_values
from distexp.resolve.absolute_paths import make_paths_absolute
from distexp.resolve.accumulation import set_accumulation
from distexp.resolve.data_checks import check_lengths, check_sizes, check_task
from distexp.resolve.device_checks import check_device
from distexp.resolve.file_checks import (
    check_checkpoint,
    check_dataset_files,
    check_files,
    check_model_files,
    check_tokenizer_files,
)
from distexp.resolve.implied_strategy import Choices, check_implied_strategy
from distexp.resolve.kernels import choose_kernels
from distexp.resolve.option_checks import check_cluster_keys, check_dataset_keys, check_model_keys, check_targets
from distexp.resolve.plan_checks import check_plan
from distexp.resolve.profile_steps import choose_profile_steps
from distexp.resolve.resources import decide_resources
from distexp.resolve.scaling import apply_scaling
from distexp.resolve.shrink import check_exercise_device, shrink_global_batch, shrink_to_scale
from distexp.resolve.speed_checks import check_speed_options
from distexp.resolve.strategy_steps import check_strategy, check_trainer, set_strategy_defaults
from distexp.resolve.tracker_checks import check_tracker
from distexp.resolve.typed_config import to_dataclasses

Step = Callable[[Config], Iterable[str]]
"""A step may change the configuration in place. It returns its errors and leaves raising to ``resolve``."""

SECTION_CHECKS: tuple[Step, ...] = (
    check_values,
    check_targets,
    check_model_keys,
    check_dataset_keys,
    check_cluster_keys,
)
"""Checks of each section by itself. Their errors are raised before anything is decided."""

DECISIONS: tuple[Step, ...] = (
    shrink_to_scale,
    make_paths_absolute,
    decide_resources,
    set_strategy_defaults,  # needs the device
    choose_kernels,  # needs the options of the strategy
    apply_scaling,  # needs the number of workers
    shrink_global_batch,  # needs the number of workers
    set_accumulation,  # needs the scaled micro-batch
    choose_profile_steps,
)
"""Steps that set what the user left open. Each one relies on those before it."""

CROSS_CHECKS: tuple[Step, ...] = (
    check_task,
    check_lengths,
    check_sizes,
    check_files,
    check_dataset_files,
    check_model_files,
    check_tokenizer_files,
    check_checkpoint,
    check_tracker,
    check_plan,
    check_device,
    check_strategy,
    check_trainer,
    check_speed_options,
)
"""Checks of several sections together. Their errors are raised together with those of the decisions."""


def resolve(composed: DictConfig, choices: Choices) -> Config:
    """Return the typed configuration with every open value decided and all checks passed.

    Args:
        composed: the configuration that Hydra composed on the schema, with or without its ``hydra`` node.
        choices: the chosen option of each config group.

    Raises:
        ConfigError: with all errors of a stage.
    """
    config = to_dataclasses(composed)
    run_steps(config, (*SECTION_CHECKS, partial(check_implied_strategy, choices=choices)))
    try:
        run_steps(config, (*DECISIONS, *CROSS_CHECKS))
    except ConfigError:
        run_steps(config, (check_exercise_device,))  # scale=tiny also sets the precision and the data
        raise
    return config


def run_steps(config: Config, steps: Sequence[Step]) -> None:
    """Run steps in order, then raise all of their errors, and what they decided, as one ConfigError."""
    errors: list[str] = []
    for step in steps:
        errors += step(config)
    if errors:
        raise ConfigError(list(dict.fromkeys(errors)), config)
