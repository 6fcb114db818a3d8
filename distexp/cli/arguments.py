"""Normalization of the command line: what users type becomes what Hydra accepts."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.override_parser.types import Override

from distexp.cli.argument_checks import check_arguments, split_options
from distexp.cli.command_keys import ignored_keys
from distexp.cli.overrides import add_plus_prefix, home_message, parse, plain_value, quote_choice
from distexp.config import Command, ConfigError
from distexp.config.key_info import takes_list
from distexp.config.paths import config_groups, options_of

HYDRA_FLAGS = ("--cfg", "-c", "--info", "-i", "--shell-completion", "-sc", "--hydra-help")
"""Flags of Hydra that run nothing."""

VARIED_BY_CHOOSE = frozenset(
    ("strategy", "sharding", "zero_stage", "offload", "kernels", "train.micro_batch_size", "train.compile")
)
"""Keys that ``choose.space`` may vary, and that users type with several values."""

RESERVED_KEYS = {
    "hydra/launcher": "choose the launcher with cluster=",
    "hydra.launcher": "choose the launcher with cluster=",
    "cluster.launcher": "choose the launcher with cluster=",
    "cluster._target_": "choose the launcher with cluster=",
    "command": "type the name of the command first, as in distexp plan",
    "hydra/sweeper": "add cells with sweep.cells",
    "hydra.mode": "leave it out",
    "hydra.output_subdir": "leave it out",
    "sweep.shared_start": "leave it out, because local runs always share the import of the libraries",
}
"""Keys that distexp sets itself, with hints."""

OUTPUT_DIRS = ("hydra.run.dir", "hydra.sweep.dir")


def normalize_arguments(
    arguments: Sequence[str], command: Command = Command.TRAIN, added: Sequence[str] = ()
) -> list[str]:
    """Return the arguments for Hydra: choices quoted, new keys marked, and every run a sweep.

    The overrides come first, because Hydra's parser accepts no option between them.

    Args:
        arguments: What the user has typed after the command.
        command: The command.
        added: Overrides that the command puts in front of the typed ones.

    Raises:
        ConfigError: with every error of the arguments.
    """
    check_arguments(arguments, may_name_command=command == Command.TRAIN)
    given, options = split_options(arguments)
    groups = config_groups()
    overrides = [quote_choice(add_plus_prefix(text), groups) for text in (*added, *given)]
    if any(option.split("=")[0] in HYDRA_FLAGS for option in options):
        check_single_run(overrides)
        return [*overrides, *options]
    parsed = parse(overrides)
    check_sweep(parsed, command, multirun=bool({"-m", "--multirun"} & set(options)))
    from distexp.cli.strategy_sweeps import strategy_sweep_warning  # --cfg and --info need none of its imports

    if warning := strategy_sweep_warning(parsed):
        print(f"distexp: warning: {warning}", file=sys.stderr)
    rest = [option for option in options if option not in ("-m", "--multirun", "-r", "--run")]
    return ["--multirun", *(text for override in overrides for text in _use_sweep_dir(override)), *rest]


def check_sweep(overrides: Sequence[Override], command: Command, *, multirun: bool) -> None:
    """Check for overrides that Hydra would ignore or misunderstand silently.

    Raises:
        ConfigError: with every error.
    """
    by_key = {override.get_key_element().lstrip("+~"): override for override in overrides}
    swept = [key for key, override in by_key.items() if override.is_sweep_override()]
    errors = [
        f"{by_key[key].input_line} cannot be swept, because {key} decides how a sweep runs: start one command for each"
        for key in ("cluster", "experiment", "repeats")
        if key in swept
    ]
    if "repeats" in by_key and "train.seed" in swept:
        errors.append("train.seed and repeats both repeat each cell: set one seed, or leave repeats out")
    if swept and not multirun and "experiment" not in by_key:
        shown = " ".join(str(by_key[key].input_line).replace("'", "") for key in swept)
        errors.append(f"{shown} is a sweep: {_sweep_hint(swept, by_key, command)}")
    if "hydra.run.dir" in by_key and (swept or "sweep.cells" in by_key or _repeats(by_key)):
        errors.append(
            "hydra.run.dir is the directory of a single run, but this is a sweep: set hydra.sweep.dir instead"
        )
    errors += _output_dir_errors(by_key)
    errors += _model_name_errors(by_key)
    errors += [error for _, error in ignored_keys(overrides, command)]
    errors += [f"{key} cannot be set: {hint}" for key, hint in RESERVED_KEYS.items() if key in by_key]
    errors += [
        f"{override.input_line} is not an option: leave it out"
        for key, override in by_key.items()
        if (key == "hydra" or key.startswith("hydra/")) and override.value() is None
    ]
    if errors:
        raise ConfigError(errors)


def _sweep_hint(swept: Sequence[str], by_key: Mapping[str, Override], command: Command) -> str:
    """Return what to type instead of several values without ``--multirun``."""
    if command == Command.CHOOSE and not set(swept) <= VARIED_BY_CHOOSE:
        return "choose is for one training, so set one value"
    if command == Command.CHOOSE:
        entries = ",".join(f'"{by_key[key].input_line}"' for key in swept).replace("'", "")
        return (
            "choose is for one training, so set one value. To vary what keeps the training, use choose.space: write "
            f"choose.space='[{entries}]'"
        )
    lists = [key for key in swept if takes_list(key)]
    if lists:
        name, _, value = str(by_key[lists[0]].input_line).partition("=")
        return f"write '{name}=[{value}]' for a list, or add --multirun"
    return "add --multirun, or set one value"


def _output_dir_errors(by_key: Mapping[str, Override]) -> list[str]:
    """Return an error for each output directory that is empty, as after an unset variable, or in ``~``."""
    errors = []
    for key in (key for key in OUTPUT_DIRS if key in by_key and not by_key[key].is_sweep_override()):
        value = plain_value(by_key[key].value())
        if value in ("", None):
            errors.append(f"{by_key[key].input_line} names no directory: write {key}=DIR, or leave it out")
        elif str(value) == "~" or str(value).startswith("~/"):
            errors.append(home_message(key, str(value)))
    return errors


def _model_name_errors(by_key: Mapping[str, Override]) -> list[str]:
    """Return an error if ``model.name`` would only rename a model of distexp."""
    name, model = by_key.get("model.name"), by_key.get("model")
    if name is None or "experiment" in by_key or "${" in str(name.input_line):
        return []
    if model is not None and not set(map(str, _values(model))) & set(options_of("model")) - {"hf"}:
        return []
    text = str(name.input_line)
    return [f"{text} does not choose a model, because only model=hf reads model.name: write model=hf {text}"]


def _values(override: Override) -> list[Any]:
    return list(override.sweep_iterator()) if override.is_sweep_override() else [override.value()]


def _repeats(by_key: Mapping[str, Override]) -> bool:
    return "repeats" in by_key and by_key["repeats"].value() != 1


def check_single_run(overrides: Sequence[str]) -> None:
    """Check that no override sweeps, for commands that print one configuration.

    Raises:
        ConfigError: with an error for each override that sweeps.
    """
    swept = [text.replace("'", "") for text in overrides if any(part.is_sweep_override() for part in parse([text]))]
    if swept:
        raise ConfigError([f"{text} is a sweep, but --cfg and --info print one run: set one value" for text in swept])


def _use_sweep_dir(argument: str) -> list[str]:
    """Replace ``hydra.run.dir``: a single run is a sweep of one cell without a subfolder."""
    key, _, value = argument.partition("=")
    return [f"hydra.sweep.dir={value}", "hydra.sweep.subdir=."] if key == "hydra.run.dir" else [argument]
