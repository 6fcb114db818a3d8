"""Checks of arguments that are neither options of Hydra nor overrides."""

from __future__ import annotations

import shlex
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import NoReturn

from hydra._internal.utils import get_args_parser

from distexp.cli.commands import COMMANDS
from distexp.cli.overrides import is_override
from distexp.cli.suggestions import ALIASES, OPTION_ALIASES, suggest
from distexp.config import ConfigError
from distexp.config.key_info import known_keys
from distexp.config.paths import config_groups, options_of

ACTIONS = ("run", "multirun", "cfg", "info")
"""Options of Hydra that exclude each other."""

RUN_OPTIONS = ("--multirun", "--config-dir", "--help", "--version", "--cfg", "--info", "--hydra-help")
"""Options of a run that a mistyped one may mean."""

RUN_NAMES = ("train", "start", "launch", "fit", "benchmark")
"""Commands of other programs that start a training."""

VALUE_OPTIONS = ("--config-dir", "-cd", "--config-name", "-cn", "--config-path", "-cp")
"""Options of Hydra whose value may have the name of a command."""


def check_arguments(arguments: Sequence[str], *, may_name_command: bool = True) -> None:
    """Check for unknown commands, options and short keys, and for spaces inside overrides.

    Hydra's own parser would print a page of usage instead of the error.

    Args:
        arguments: What the user has typed after the command.
        may_name_command: Whether no command was typed, so that the first argument may be meant as one.

    Raises:
        ConfigError: with every error.
    """
    parser = get_args_parser()
    parser.error = _raise_error  # type: ignore[method-assign]
    known, unknown = parser.parse_known_intermixed_args(list(arguments))
    overrides: list[str] = known.overrides
    # An error may cause others of the kinds below it, so only the first kind is reported.
    errors = (
        _option_errors(known, unknown, arguments)
        or _space_errors(overrides)
        or [_explain_position(name, arguments) for name in overrides if name in COMMANDS]
        or (_first_argument_errors(overrides, arguments) if may_name_command else [])
        or list(short_key_errors(overrides))
    )
    if errors:
        raise ConfigError(errors)


def _option_errors(known: Namespace, unknown: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Return an error for each option that does not exist, is not supported, or excludes another one.

    Args:
        known: What Hydra's parser has recognized.
        unknown: The other arguments.
        arguments: All arguments.
    """
    errors = [_explain_option(argument, arguments) for argument in unknown if argument.startswith("-")]
    if known.experimental_rerun is not None:
        errors.append("--experimental-rerun is not supported: use distexp resume DIR")
    actions = [f"--{name}" for name in ACTIONS if getattr(known, name)]
    if len(actions) > 1:
        errors.append(f"{' and '.join(actions)} exclude each other: use one of them")
    return errors


def _space_errors(overrides: Sequence[str]) -> list[str]:
    return [
        f"unexpected space in '{' '.join(parts)}': write {suggest_fix(parts)}" for parts in split_overrides(overrides)
    ]


def _first_argument_errors(overrides: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Return an error if the first argument is no override, so that it was probably meant as a command."""
    if overrides and arguments[0] == overrides[0] and not is_override(arguments[0]):
        return [_explain_command(arguments[0])]
    return []


def split_options(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the overrides, and the options with their values, of checked arguments."""
    overrides: list[str] = get_args_parser().parse_known_intermixed_args(list(arguments))[0].overrides
    options = list(arguments)
    for override in overrides:
        options.remove(override)
    return overrides, options


def split_overrides(overrides: Sequence[str]) -> Iterator[list[str]]:
    """Yield the parts of each override that was split by spaces, as in ``strategy= fsdp``."""
    groups: list[list[str]] = []
    keys = known_keys()
    for argument in overrides:
        if groups and _continues(groups[-1][-1], argument, keys):
            groups[-1].append(argument)
        else:
            groups.append([argument])
    return (parts for parts in groups if len(parts) > 1)


def suggest_fix(parts: Sequence[str]) -> str:
    """Return the override that the parts were probably meant to be."""
    joined = "".join(parts)
    return joined if "=" in joined else f"{parts[0]}={''.join(parts[1:])}"


def _continues(previous: str, argument: str, keys: set[str]) -> bool:
    if "=" in argument.lstrip("=") or argument.startswith(("~", "+")):
        return False
    return previous in keys or previous.endswith(("=", ",")) or argument.startswith(("=", ","))


def short_key_errors(overrides: Sequence[str]) -> Iterator[str]:
    """Yield an error for each key without its section, such as ``lr=0.1``, if only one key can be meant."""
    keys = known_keys()
    for override in overrides:
        name, equals, value = override.partition("=")
        if name in ("multirun", "m") and equals:
            yield f"{name} is not a key: write --multirun to start a sweep, or leave it out"
            continue
        found = _keys_named(_without_unknown_section(name, keys)) if equals and name not in keys else []
        if len(found) == 1:
            yield f"{name} is not a key: write {found[0]}={value}"


def _without_unknown_section(key: str, keys: set[str]) -> str:
    """Return a key without its section if there is no such section, as in ``slurm.partition``."""
    section, dot, name = key.partition(".")
    is_known = section in keys or section.startswith(("hydra", "+", "~"))
    return key if is_known or not dot else name.rpartition(".")[2]


def _raise_error(message: str) -> NoReturn:
    raise ConfigError(f"{message}: see distexp --help")


def _explain_position(command: str, arguments: Sequence[str]) -> str:
    """Return the error for a command that is not the first argument, as in ``distexp strategy=ddp plan``."""
    typed = list(arguments)
    del typed[_position_of(command, typed)]
    return f"{command} is a command, which must come first: type {shlex.join(['distexp', command, *typed])}"


def _position_of(command: str, arguments: Sequence[str]) -> int:
    """Return the last position of a command, which may also be the name of a folder behind ``--config-dir``."""
    previous = ["", *arguments]
    return max(
        position
        for position, argument in enumerate(arguments)
        if argument == command and previous[position] not in VALUE_OPTIONS
    )


def _explain_command(argument: str) -> str:
    """Return the error for a first argument without ``=``, such as ``strategy`` or ``deepspeed/zero_stages``."""
    groups = [group for group in config_groups() if argument in options_of(group)]
    key, _, value = argument.partition(":")
    if value and key in known_keys():
        hint = f": write {key}={value}"
    elif argument in RUN_NAMES:
        hint = ": to start a run, type distexp run, or leave the word out"
    elif argument in config_groups():
        hint = f": write {argument}=OPTION, with one of {', '.join(options_of(argument))}"
    elif groups:
        hint = f": write {' or '.join(f'{group}={argument}' for group in groups)}"
    elif argument in known_keys():
        hint = f": write {argument}=VALUE"
    elif argument in OPTION_ALIASES:
        hint = f": write {OPTION_ALIASES[argument]}"
    else:
        option = next((f": write {option}" for option in RUN_OPTIONS if option.lstrip("-") == argument), "")
        hint = option or suggest(argument, COMMANDS) or ": see distexp --help"
    return f"{argument} is neither a command nor KEY=VALUE{hint}"


def _explain_option(argument: str, arguments: Sequence[str]) -> str:
    """Return the error for an option such as ``--strategy=fsdp``, or ``--strategy`` with its value behind it."""
    option, equals, value = argument.partition("=")
    following = [*arguments[arguments.index(argument) + 1 :], ""][0]
    if not equals:
        value = following if following and not following.startswith("-") and "=" not in following else "VALUE"
    hint = " or ".join(f"{key}={value}" for key in _keys_named(option.lstrip("-").replace("-", "_")))
    if hint:
        return f"{option} is not an option: write {hint}"
    return f"{option} is not an option{suggest(option, RUN_OPTIONS) or ': see distexp --help'}"


def _keys_named(name: str) -> list[str]:
    """Return the keys with a name or an alias in any section; none if there are more than two."""
    keys = known_keys()
    if name in keys:
        return [name]
    if name in ALIASES:
        return [ALIASES[name]]
    ending = sorted(key for key in keys if key.endswith(f".{name}") and not key.startswith("scale."))
    return ending if len(ending) <= 2 else []
