"""The steps from a composed configuration to one that can run, in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache, partial
from typing import Any

from omegaconf import DictConfig, MissingMandatoryValue, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from distexp.config import Config, ConfigError
from distexp.config.keys import check_values, conf_dir
from distexp.config.model_checks import model_errors, unused_key_errors
from distexp.resolve import resources, scaling_rules, section_checks
from distexp.resolve.kernels import check_speed_options, choose_kernels


def without_hydra(composed: DictConfig) -> DictConfig:
    """Return a copy of a composed configuration without its ``hydra`` node."""
    content = composed.copy()
    with open_dict(content):
        content.pop("hydra", None)
    return content


def to_dataclasses(composed: DictConfig) -> Config:
    """Convert a composed configuration to dataclasses. Raise ConfigError for a wrong key, value or reference."""
    unknown = sorted({*_unknown_keys(composed, Config)} - {"hydra"})
    if unknown:
        raise ConfigError([f"{key} is not a key of the configuration: leave it out" for key in unknown])
    try:
        # Hydra has checked the types. Merging into the schema again would take 20 ms per run.
        values = {spec.name: composed[spec.name] for spec in fields(Config)}
        typed: dict[str, Any] = {
            name: OmegaConf.to_object(value) if OmegaConf.is_config(value) else value for name, value in values.items()
        }
    except MissingMandatoryValue as error:
        missing = ", ".join(sorted(OmegaConf.missing_keys(without_hydra(composed))))
        example = " to a hub id or a folder, for example model.name=bigscience/bloom-560m"
        raise ConfigError(f"{missing} is required: set it{example if missing == 'model.name' else ''}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0]) from error
    return Config(**typed)


def _unknown_keys(section: DictConfig, schema: Any) -> Iterator[str]:
    """Yield the keys that the user added with a plus and that no dataclass has."""
    known = {spec.name for spec in fields(schema)}
    for key, node in section.items_ex(resolve=False):
        if key not in known:
            yield str(key)
        elif isinstance(node, DictConfig) and is_dataclass(below := OmegaConf.get_type(node)):
            yield from (f"{key}.{name}" for name in _unknown_keys(node, below))


Choices = Mapping[str, str | None]

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


def choose_profile_steps(config: Config) -> None:
    """Set ``train.profile_steps`` for ``profile=true``, unless it has a value."""
    if config.profile and not config.train.profile_steps:
        config.train.profile_steps = 3  # Their median has neither the start nor the end of the profile.


Step = Callable[[Config], Iterable[str] | None]
"""A step may change the configuration in place. It returns its errors, if any, and leaves raising to ``resolve``."""

SECTION_CHECKS: tuple[Step, ...] = (
    check_values,
    section_checks.check_targets,
    lambda config: model_errors(config.model),
    lambda config: unused_key_errors("dataset", config.dataset),
    section_checks.check_cluster_keys,
)
"""Checks of each section by itself. Their errors are raised before anything is decided."""

DECISIONS: tuple[Step, ...] = (
    scaling_rules.shrink_to_scale,
    resources.make_paths_absolute,
    resources.decide_resources,
    resources.set_strategy_defaults,  # needs the device
    choose_kernels,  # needs the options of the strategy
    scaling_rules.apply_scaling,  # needs the number of workers
    scaling_rules.shrink_global_batch,  # needs the number of workers
    scaling_rules.set_accumulation,  # needs the scaled micro-batch
    choose_profile_steps,
)
"""Steps that set what the user left open. Each one relies on those before it."""

CROSS_CHECKS: tuple[Step, ...] = (
    section_checks.check_task,
    section_checks.check_lengths,
    section_checks.check_sizes,
    section_checks.check_files,
    section_checks.check_dataset_files,
    section_checks.check_model_files,
    section_checks.check_tokenizer_files,
    section_checks.check_checkpoint,
    section_checks.check_tracker,
    section_checks.check_plan,
    resources.check_device,
    resources.check_strategy,
    resources.check_trainer,
    check_speed_options,
)
"""Checks of several sections together. Their errors are raised together with those of the decisions."""


def resolve(composed: DictConfig, choices: Choices) -> Config:
    """Return the typed configuration with every open value decided, or raise ConfigError with the errors of a stage."""
    config = to_dataclasses(composed)
    run_steps(config, (*SECTION_CHECKS, partial(check_implied_strategy, choices=choices)))
    try:
        run_steps(config, (*DECISIONS, *CROSS_CHECKS))
    except ConfigError:
        run_steps(config, (scaling_rules.check_exercise_device,))  # scale=tiny also sets the precision and the data
        raise
    return config


def run_steps(config: Config, steps: Sequence[Step]) -> None:
    """Run steps in order, then raise all of their errors, and what they decided, as one ConfigError."""
    errors: list[str] = []
    for step in steps:
        errors += step(config) or ()
    if errors:
        raise ConfigError(list(dict.fromkeys(errors)), config)
