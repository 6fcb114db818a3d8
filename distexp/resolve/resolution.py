"""The order in which a composed configuration is typed, filled in and judged."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, MissingMandatoryValue, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from distexp.config import Config, ConfigError
from distexp.config.model_checks import loads_from_source, model_errors, unused_key_errors, weights_source_key
from distexp.config.targets import check_target
from distexp.engines.base import load_trainer
from distexp.resolve.cross_checks import cross_field_errors
from distexp.resolve.local_resources import decide_placement
from distexp.resolve.scaling import scale_work
from distexp.resolve.shrink import shrink, too_many_workers
from distexp.resolve.slurm_resources import misplaced_cluster_keys
from distexp.resolve.value_ranges import bad_values
from distexp.strategies.base import load_strategy

Choices = Mapping[str, str | None]

KNOBS = {"sharding": "fsdp", "zero_stage": "deepspeed"}
"""Groups that mean something to one strategy only, and imply it."""


def without_hydra(composed: DictConfig) -> DictConfig:
    """What Hydra composed, less its own node."""
    content = composed.copy()
    with open_dict(content):
        del content["hydra"]
    return content


def resolve(composed: DictConfig, choices: Choices) -> Config:
    """Types a composed configuration, fills in what was left open, and judges all of it at once.

    Args:
        composed: the DictConfig that Hydra composed on our schema, with its ``hydra`` node or without.
        choices: the chosen option of each config group.

    Raises:
        ConfigError: with a sentence for each error.
    """
    try:
        config = _as_dataclasses(composed)
    except MissingMandatoryValue as error:
        own = without_hydra(composed) if "hydra" in composed else composed
        missing = ", ".join(sorted(OmegaConf.missing_keys(own)))
        raise ConfigError(f"Nothing is said of {missing}: set it, or choose an option of its group") from error
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0]) from error
    errors = [*bad_values(config), *_bad_targets(config), *_misplaced_knobs(config, choices)]
    errors += [
        *model_errors(config.model),
        *unused_key_errors("dataset", config.dataset),
        *misplaced_cluster_keys(config.cluster),
    ]
    if errors:
        raise ConfigError(errors)
    errors += shrink(config)
    _make_paths_absolute(config)
    strategy = load_strategy(config)
    errors += decide_placement(config)
    strategy.set_defaults(config)
    errors += too_many_workers(config) or scale_work(config)
    errors += [*cross_field_errors(config), *strategy.validate(config), *load_trainer(config).validate(config)]
    if errors:
        raise ConfigError(list(dict.fromkeys(errors)))
    return config


def _as_dataclasses(composed: DictConfig) -> Config:
    """The sections as they are, which Hydra composed on our schema: merging them into it anew takes 20 ms a run."""
    unknown = sorted({*_unknown(composed, Config)} - {"hydra"})
    if unknown:
        raise ConfigError(
            [f"{key} is no key of the configuration: leave it out (docs/configuration.md has all)" for key in unknown]
        )
    values = {field.name: composed[field.name] for field in fields(Config)}
    typed: dict[str, Any] = {
        name: OmegaConf.to_object(value) if OmegaConf.is_config(value) else value for name, value in values.items()
    }
    return Config(**typed)


def _unknown(section: DictConfig, schema: Any) -> Iterator[str]:
    """Keys that were added with a plus, and that no dataclass has."""
    known = {field.name for field in fields(schema)}
    for key, node in section.items_ex(resolve=False):
        if key not in known:
            yield str(key)
        elif isinstance(node, DictConfig) and is_dataclass(below := OmegaConf.get_type(node)):
            yield from (f"{key}.{name}" for name in _unknown(node, below))


def _bad_targets(config: Config) -> Iterator[str]:
    targets = [section._target_ for section in (config.model, config.dataset, config.strategy, config.engine)]
    for target in [*targets, *filter(None, [config.tracker._target_])]:
        error = check_target(target, config.trusted_packages)
        if error:
            yield error


def _misplaced_knobs(config: Config, choices: Choices) -> Iterator[str]:
    for knob, strategy in KNOBS.items():
        choice = choices.get(knob)
        if choice not in (None, "null") and config.strategy.name != strategy:
            yield (
                f"{knob}={choice} belongs to strategy={strategy}, but this run has "
                f"strategy={config.strategy.name}: leave {knob} out, or choose strategy={strategy}"
            )


def _make_paths_absolute(config: Config) -> None:
    """Paths mean the same to a worker that starts elsewhere; hub ids are left alone."""

    def absolute(section: Any, key: str, *, only_existing: bool = False) -> None:
        value = getattr(section, key)
        if value is not None and (not only_existing or Path(value).expanduser().exists()):
            setattr(section, key, os.path.abspath(os.path.expanduser(value)))

    for key in ("train_path", "eval_path", "root"):
        absolute(config.dataset, key)
    absolute(config.deepspeed, "config_file")
    absolute(config.train, "resume")
    absolute(config.dataset, "path", only_existing=True)
    if config.model.tokenizer not in ("auto", "byte"):
        absolute(config.model, "tokenizer", only_existing=True)
    if loads_from_source(config.model):
        absolute(config.model, weights_source_key(config.model), only_existing=True)
