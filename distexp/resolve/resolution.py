"""The steps from a composed configuration to one that can run, in their order."""

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache, partial
from typing import Any, cast

from omegaconf import MISSING, DictConfig, MissingMandatoryValue, OmegaConf, open_dict
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from distexp.config import Command, Config, ConfigError, ModelConfig
from distexp.config.keys import (
    check_types,
    check_values,
    conf_dir,
    explain_missing,
    get_value,
    options_of,
    reference_errors,
    schema_fields,
    sections,
    set_value,
    strategy_sections,
)
from distexp.config.model_checks import (
    MODEL_TYPE,
    POSITIONS,
    TEXT,
    architecture_of,
    model_errors,
    names_source,
    unused_key_errors,
)
from distexp.config.overrides import format_override, key_of, parse, plain_value, without_plus_prefix
from distexp.exceptions import first_line
from distexp.resolve import compile_results, kernels, resources, scaling_rules, section_checks
from distexp.strategies.base import load_strategy
from distexp.strategies.parallel.checks import parallel_errors

DEFAULT_LENGTH = 512
"""Most tokens of a sample of own texts, if the model has as many positions."""

AFTER_PADDING = {
    *("camembert", "data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "longformer", "luke", "markuplm", "mpnet"),
    *("roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
}
"""Types of models whose positions are counted from the row after that of the padding."""

AFTER_NEXT = {"prophetnet", "xlm-prophetnet"}
"""Types whose last position is that of a token after the sequence, and which count as those above."""


def choose_length(config: Config) -> None:
    """Set the length of own texts, if it is open."""
    if section_checks.reads_own_data(config.dataset) and "max_length" in config.dataset.keys:
        known = config.model.seq_length or _positions(config.model)
        config.dataset.max_length = config.dataset.max_length or min(DEFAULT_LENGTH, known or DEFAULT_LENGTH)


def _positions(model: ModelConfig) -> int | None:
    """Return the positions in the config.json of a model of transformers; None if they are unknown."""
    if not (MODEL_TYPE in model.options or names_source(model)):
        return None
    found = architecture_of(model)
    places = (found, found.get(TEXT))
    sizes = [place.get(key) for place in places if isinstance(place, Mapping) for key in POSITIONS]
    size = next((size for size in sizes if type(size) is int and size > 1), None)
    kind, padding = found.get(MODEL_TYPE), found.get("pad_token_id", 1)
    if kind not in AFTER_PADDING | AFTER_NEXT or size is None or type(padding) is not int:
        return size
    return max(size - padding - 1 - (kind in AFTER_NEXT), 1)


def without_hydra(composed: DictConfig) -> DictConfig:
    """Return a copy of a composed configuration without its ``hydra`` node."""
    content = composed.copy()
    with open_dict(content):
        content.pop("hydra", None)
    return content


def to_dataclasses(composed: DictConfig) -> Config:
    """Convert a composed configuration to dataclasses. Raise ConfigError for a wrong key, value or reference."""
    if unknown := sorted({*_unknown_keys(composed, Config)} - {"hydra"}):
        raise ConfigError([f"{key} is not a key of the configuration: leave it out" for key in unknown])
    if deleted := [f"~{spec.name}" for spec in fields(Config) if spec.name not in composed]:
        raise ConfigError([f"{typed} deletes what every run has: leave it out" for typed in deleted])
    try:
        # Hydra has checked the types. Merging into the schema again would take 20 ms per run.
        values = {spec.name: composed[spec.name] for spec in fields(Config)}
        typed: dict[str, Any] = {
            name: OmegaConf.to_object(value) if OmegaConf.is_config(value) else value for name, value in values.items()
        }
    except (MissingMandatoryValue, InterpolationToMissingValueError) as error:
        raise ConfigError(explain_missing(without_hydra(composed), error)) from error
    except OmegaConfBaseException as error:
        raise ConfigError(reference_errors(composed) or first_line(error)) from error
    check_types(config := Config(**typed))
    return config


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


def check_names(config: Config, choices: Choices, overrides: Iterable[str]) -> Iterator[str]:
    """Yield an error for each typed name that changes nothing but a label, and each class of another option.

    A custom option or ``_target_`` may have any name.
    """
    typed_keys = set(map(key_of, overrides))
    for group in ("strategy", "engine", "dataset", "cluster", "tracker", "model", "scale"):
        section, option = getattr(config, group), choices.get(group)
        target = str(getattr(section, "_target_", None) or "distexp.")
        is_custom = not target.startswith("distexp.")
        if f"{group}._target_" in typed_keys and (owner := _targets(group).get(target, option)) != option:
            yield f"{group}._target_={target} is that of {group}={owner}: write {group}={owner}"
        if f"{group}.name" not in typed_keys or is_custom or not (conf_dir() / group / f"{option}.yaml").is_file():
            continue
        if section.name != option and "name" not in getattr(section, "keys", ()):
            typed = f"{group}.name={section.name}"
            chosen = f"model=hf {typed}" if group == "model" else None
            chosen = f"{group}={section.name}" if section.name in options_of(group) else chosen
            yield f"{typed} only renames {group}={option}: {f'write {chosen}, or ' if chosen else ''}leave it out"


def _targets(group: str) -> dict[str, str]:
    """Return the options of a group by their classes or functions; those of models, which share them, are left out."""
    contents = {
        option: cast(Any, OmegaConf.load(conf_dir() / group / f"{option}.yaml")) for option in options_of(group)
    }
    return {str(content["_target_"]): option for option, content in contents.items() if "_target_" in content}


def foreign_options(overrides: Iterable[str], configs: Iterable[Config | None]) -> Iterator[str]:
    """Yield an error for each override in the section of a strategy that no cell has, unless it has its default.

    Yield none if an invalid cell has no known strategy, if one has a custom strategy, which may read any section, or
    for ``distexp choose``, which varies the strategy.
    """
    sections_read = (*strategy_sections(), "strategy.options")
    options = [text for text in overrides if f"{key_of(text)}.".startswith(tuple(f"{name}." for name in sections_read))]
    known = {config.strategy._target_ if config else "": config for config in configs} if options else {}
    chosen = [config for target, config in known.items() if config and target.startswith("distexp.")]
    if len(chosen) < len(known) or any(config.command == Command.CHOOSE for config in chosen):
        return
    names = ",".join(config.strategy.name for config in chosen)
    read = [load_strategy(config).section for config in chosen]
    used = f"{'this run has' if len(chosen) == 1 else 'these runs have'} strategy={names}"
    for text in options:
        (section, _, name), value = key_of(text).partition("."), plain_value(parse([text])[0].value())
        if section == "strategy":
            typed = without_plus_prefix(format_override(text))
            yield f"{typed} is for custom strategies, but {used}: leave it out"
        elif section not in read and value != vars(sections()[section]()).get(name):
            needed = f"strategy={section}"
            yield f"{format_override(text)} needs {needed}, but {used}: leave it out, or choose {needed}"


def shared_folders(nodes: Iterable[DictConfig]) -> Iterator[str]:
    """Yield an error for the first of the ``hydra`` nodes of cells whose run would have the folder of another one."""
    numbers: dict[str, int] = {}
    for number, node in enumerate(nodes):
        node.job.num = number
        if (other := numbers.setdefault(os.path.normpath(node.sweep.subdir), number)) != number:
            typed = cast(dict[str, Any], OmegaConf.to_container(node.sweep))["subdir"]
            named = f"hydra.sweep.subdir={typed}" if typed != "." else "hydra.run.dir or hydra.sweep.subdir=."
            yield (
                f"{named} gives run {other} and run {number} one folder: set hydra.sweep.dir only, or give each run a "
                "folder, as in hydra.sweep.subdir='run_${hydra.job.num}'"
            )
            return


@lru_cache(maxsize=256)
def implied_strategy(group: str, option: str) -> str | None:
    """Return the strategy that an option implies, None if it implies none.

    A preset only suggests a strategy: the command line may choose another one.
    """
    if group == "experiment" or not (path := conf_dir() / group / f"{option}.yaml").is_file():
        return None
    content: Any = OmegaConf.load(path)
    entries = (entry for entry in content.get("defaults", []) if OmegaConf.is_dict(entry) and OVERRIDE in entry)
    return next((str(entry[OVERRIDE]) for entry in entries), None)


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
    choose_length,
    scaling_rules.shrink_to_scale,
    resources.make_paths_absolute,
    section_checks.decide_task,  # reads the folder of the model
    resources.decide_resources,
    resources.set_strategy_defaults,  # needs the device
    kernels.choose_kernels,  # needs the options of the strategy
    scaling_rules.apply_scaling,  # needs the number of workers
    scaling_rules.shrink_global_batch,  # needs the number of workers
    scaling_rules.set_accumulation,  # needs the scaled micro-batch
    choose_profile_steps,
    section_checks.set_adapter_defaults,
    compile_results.use_results,  # needs the scaled model
)
"""Steps that set what the user left open. Each one relies on those before it."""

CROSS_CHECKS: tuple[Step, ...] = (
    section_checks.check_task,
    section_checks.check_lengths,
    section_checks.check_sizes,
    section_checks.check_files,
    section_checks.check_dataset_files,
    section_checks.check_own_data,
    section_checks.check_model_files,
    section_checks.check_tokenizer_files,
    section_checks.check_checkpoint,
    section_checks.check_tracker,
    section_checks.check_plan,
    section_checks.check_adapter,
    resources.check_device,
    resources.check_low_bits,
    resources.check_strategy,
    parallel_errors,
    resources.check_trainer,
    kernels.check_speed_options,
)
"""Checks of several sections together. Their errors are raised together with those of the decisions."""


def resolve(composed: DictConfig, choices: Choices) -> Config:
    """Return the typed configuration with every open value decided, or raise ConfigError with the errors of a stage."""
    config, typed = to_dataclasses(composed), OmegaConf.select(composed, "hydra.overrides.task", default=())
    try:
        run_steps(
            config,
            (
                *SECTION_CHECKS,
                partial(check_implied_strategy, choices=choices),
                partial(check_names, choices=choices, overrides=() if config.sweep.resume else typed),
            ),
        )
    except ConfigError as error:
        if error.errors == list(check_values(config)):
            raise ConfigError([*error.errors, *_other_errors(config, error.errors)], config) from None
        raise
    try:
        run_steps(config, (*DECISIONS, *CROSS_CHECKS))
    except ConfigError:
        run_steps(config, (scaling_rules.check_exercise_device,))  # scale=tiny also sets the precision and the data
        raise
    return config


def _other_errors(config: Config, wrong: Sequence[str]) -> list[str]:
    """Return the errors of decisions and cross checks, with defaults in place of the wrong values."""
    keys = [message.partition("=")[0] for message in wrong]
    others, defaults = copy.deepcopy(config), Config()
    for key in keys:
        default = get_value(defaults, key) if key in dict(schema_fields()) else MISSING
        if default == MISSING:
            return []
        set_value(others, key, default)
    try:
        run_steps(others, (*DECISIONS, *CROSS_CHECKS))
    except ConfigError as error:
        return [message for message in error.errors if not any(key in message for key in keys)]
    return []


def run_steps(config: Config, steps: Sequence[Step]) -> None:
    """Run steps in order, then raise all of their errors, and what they decided, as one ConfigError."""
    errors: list[str] = []
    for step in steps:
        errors += step(config) or ()
    if errors:
        raise ConfigError(list(dict.fromkeys(errors)), config)
