"""Normalization of the command line: what users type becomes what Hydra accepts."""

import os
import shlex
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NoReturn

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.types import Override

from distexp.cli.command_warnings import config_dir_warning, ignored_keys
from distexp.cli.errors import suggest, suggest_key
from distexp.cli.foreign_names import ALIASES, FOREIGN, OPTION_ALIASES, translate
from distexp.cli.main import COMMANDS
from distexp.config import Command, ConfigError
from distexp.config.keys import (
    RESERVED_KEYS,
    config_groups,
    is_too_long,
    known_keys,
    options_of,
    strategy_groups,
    takes_list,
)
from distexp.config.overrides import (
    OPEN_SECTIONS,
    SINGLE_RUN,
    add_plus_prefix,
    home_message,
    is_override,
    parse,
    plain_value,
    quote_choice,
    quote_for_hydra,
    shell_quote,
)
from distexp.exceptions import print_error

HYDRA_FLAGS = ("--cfg", "-c", "--info", "-i", "--shell-completion", "-sc", "--hydra-help")
"""Flags of Hydra that run nothing."""

VARIED_BY_CHOOSE = frozenset(
    ("strategy", "sharding", "zero_stage", "offload", "kernels", "train.micro_batch_size", "train.compile")
)
"""Keys that ``choose.space`` may vary, and that users type with several values."""

OUTPUT_DIRS = ("hydra.run.dir", "hydra.sweep.dir")


def normalize_arguments(
    arguments: Sequence[str], command: Command = Command.TRAIN, added: Sequence[str] = ()
) -> list[str]:
    """Return the arguments for Hydra: choices quoted, new keys marked, and every run a sweep; or raise ConfigError.

    The overrides come first, because Hydra's parser accepts no option between them. ``added`` has those that the
    command puts in front of the typed ones.
    """
    check_arguments(arguments, command)
    given, options = split_options(arguments)
    if unread := config_dir_warning(get_args_parser().parse_known_intermixed_args(list(arguments))[0].config_dir):
        print_error(f"warning: {unread}")
    groups = config_groups()
    overrides = [quote_choice(add_plus_prefix(text), groups) for text in (*added, *given)]
    if {"--shell-completion", "-sc"} & set(options) and not any(map(_asks_for_completion, given)):
        raise ConfigError(
            "--shell-completion needs install=bash, install=zsh or install=fish (or uninstall=...): write "
            'eval "$(distexp --shell-completion install=bash)"'
        )
    if any(option.split("=")[0] in HYDRA_FLAGS for option in options):
        swept = [text.replace("'", "") for text in overrides if any(part.is_sweep_override() for part in parse([text]))]
        if swept:
            raise ConfigError(
                [f"{text} is a sweep, but --cfg and --info print one run: set one value" for text in swept]
            )
        return [*overrides, *options]
    parsed = parse(overrides)
    check_sweep(parsed, command, multirun=bool({"-m", "--multirun"} & set(options)))
    from distexp.cli.command_warnings import strategy_sweep_warning  # --cfg and --info need none of its imports

    if warning := strategy_sweep_warning(parsed):
        print_error(f"warning: {warning}")
    rest = [option for option in options if option not in ("-m", "--multirun", "-r", "--run")]
    return ["--multirun", *(text for override in overrides for text in _use_sweep_dir(override)), *rest]


def _asks_for_completion(text: str) -> bool:
    """Return whether an override names a shell that Hydra knows. A shell itself asks with ``query``."""
    action, _, shell = text.partition("=")
    queries = action == "query" and "COMP_LINE" in os.environ
    return queries or (action in ("install", "uninstall") and shell in ("bash", "zsh", "fish"))


def check_sweep(overrides: Sequence[Override], command: Command, *, multirun: bool) -> None:
    """Raise a ConfigError with all overrides that Hydra would ignore or misunderstand silently."""
    by_key = {override.get_key_element().lstrip("+~"): override for override in overrides}
    swept = [key for key, override in by_key.items() if override.is_sweep_override()]
    errors = [
        f"{by_key[key].input_line} cannot be swept, because {key} decides how a sweep runs: start one command for each"
        for key in ("cluster", "cluster.dry_run", "cluster.wait", "experiment", "repeats")
        if key in swept
    ]
    if "repeats" in by_key and "train.seed" in swept:
        errors.append("train.seed and repeats both repeat each cell: set one seed, or leave repeats out")
    if swept and not multirun and "experiment" not in by_key:
        shown = [str(by_key[key].input_line).replace("'", "") for key in swept]
        files = [text.partition("=") for text in shown if os.path.exists(text.partition("=")[2])]
        quoted = [shell_quote(f"{key}={quote_for_hydra(path)}") for key, _, path in files]
        hint = f"for the file of this name, write {' '.join(quoted)}" if files else _sweep_hint(swept, by_key, command)
        errors.append(f"{' '.join(shown)} is a sweep: {hint}")
    repeats = "repeats" in by_key and by_key["repeats"].value() != 1
    for_sweeps = [str(by_key[key].input_line) for key in ("hydra.sweep.dir", "hydra.sweep.subdir") if key in by_key]
    if "hydra.run.dir" in by_key and (swept or "sweep.cells" in by_key or repeats):
        errors.append(
            "hydra.run.dir is the directory of a single run, but this is a sweep: set hydra.sweep.dir instead"
        )
    elif "hydra.run.dir" in by_key and for_sweeps:
        errors.append(
            f"{by_key['hydra.run.dir'].input_line} is the directory of a single run, and {' '.join(for_sweeps)} is for "
            "a sweep: leave one of them out"
        )
    errors += _output_dir_errors(by_key)
    errors += [error for _, error in ignored_keys(overrides, command)]
    errors += [f"{key} cannot be set: {hint}" for key, hint in RESERVED_KEYS.items() if key in by_key]
    errors += [
        f"{override.input_line} is not an option: leave it out"
        for key, override in by_key.items()
        if (key == "hydra" and not isinstance(override.value(), dict))
        or (key.startswith("hydra/") and override.value() is None)
    ]
    errors += filter(None, map(_deletion_error, overrides))
    if errors:
        raise ConfigError(errors)


def _deletion_error(override: Override) -> str | None:
    """Return an error if an override deletes what every run has, or an unknown key."""
    typed, key = str(override.input_line), str(override.key_or_group)
    is_optional = key in ("experiment", *strategy_groups())  # What a preset chooses can be deleted.
    if not override.is_delete() or is_optional or key.startswith((*OPEN_SECTIONS, "hydra")):
        return None
    if key in config_groups():
        return f"{typed} cannot delete an option that every run has: write {key}=OPTION, or leave it out"
    if key in known_keys():
        hint = f"write {key}=VALUE, or leave it out" if "." in key else "leave it out"
        return f"{typed} cannot delete a key that every run has: {hint}"
    return f"{typed}: {key} is not a key{suggest_key(key, known_keys()) or ': leave it out'}"


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


def _use_sweep_dir(argument: str) -> list[str]:
    """Replace ``hydra.run.dir``."""
    key, _, value = argument.partition("=")
    return [f"hydra.sweep.dir={value}", SINGLE_RUN] if key == "hydra.run.dir" else [argument]


RUN_OPTIONS = ("--multirun", "--config-dir", "--help", "--version", "--cfg", "--info", "--hydra-help")
"""Options of a run that a mistyped one may mean."""

OWN_OPTIONS = {
    Command.PLAN: ("--json",),
    Command.CHOOSE: ("--json",),
    Command.VERIFY: ("--quick", "--json", "--recorded"),
}
"""Further options of a command that takes those of a run too."""

RUN_NAMES = ("train", "start", "launch", "fit", "benchmark")
"""Commands of other programs that start a training."""

VALUE_OPTIONS = ("--config-dir", "-cd", "--config-name", "-cn", "--config-path", "-cp")
"""Options of Hydra whose value may have the name of a command."""


def check_arguments(arguments: Sequence[str], command: Command = Command.TRAIN) -> None:
    """Raise a ConfigError with all unknown commands, options and short keys, and with spaces inside overrides.

    Hydra's own parser would print a page of usage instead.
    """
    parser = get_args_parser()
    parser.error = _raise_error  # type: ignore[method-assign]
    parser.allow_abbrev = False  # What reads the options later, such as a printed command, knows the whole names.
    known, unknown = parser.parse_known_intermixed_args(list(arguments))
    overrides: list[str] = known.overrides
    # An error may cause others of the kinds below it, so only the first kind is reported.
    errors = (
        _option_errors(known, unknown, arguments, command)
        or list(_space_errors(overrides))
        or [_explain_position(name, arguments) for name in overrides if name in COMMANDS]
        # A first argument that is no override was probably meant as a command.
        or [
            _explain_command(name)
            for name in overrides[:1]
            if command == Command.TRAIN and name == arguments[0] and not is_override(name)
        ]
        or list(short_key_errors(overrides))
    )
    if errors:
        raise ConfigError(errors)


def _option_errors(known: Namespace, unknown: Sequence[str], arguments: Sequence[str], command: Command) -> list[str]:
    """Return an error for each option that does not exist, is not supported, or excludes another one."""
    errors = [_explain_option(argument, arguments, command) for argument in unknown if argument.startswith("-")]
    if known.experimental_rerun is not None:
        errors.append("--experimental-rerun is not supported: use distexp resume DIR")
    actions = [f"--{name}" for name in ("run", "multirun", "cfg", "info") if getattr(known, name)]
    if len(actions) > 1:
        errors.append(f"{' and '.join(actions)} exclude each other: use one of them")
    return errors


def split_options(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the overrides, and the options with their values, of checked arguments."""
    overrides: list[str] = get_args_parser().parse_known_intermixed_args(list(arguments))[0].overrides
    options = list(arguments)
    for override in overrides:
        options.remove(override)
    return overrides, options


def _space_errors(overrides: Sequence[str]) -> Iterator[str]:
    """Yield an error for each override that was split by spaces, as in ``strategy= fsdp``."""
    groups: list[list[str]] = []
    keys = known_keys()
    for argument in overrides:
        if groups and _continues(groups[-1][-1], argument, keys):
            groups[-1].append(argument)
        else:
            groups.append([argument])
    for parts in (parts for parts in groups if len(parts) > 1):
        joined = "".join(parts)
        fixed = joined if "=" in joined else f"{parts[0]}={''.join(parts[1:])}"
        yield f"unexpected space in '{' '.join(parts)}': write {fixed}"


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
        above = accumulate(name.split(".")[:-1], "{}.{}".format)
        if parent := next(filter(takes_list, above), None):
            yield f"{name} is not a key, because {parent} is a list: write {parent}=[...] with all of its values"
            continue
        if is_too_long(name):  # Hydra looks for a file of this name.
            yield f"{name} is not a key: --cfg job prints all keys"
            continue
        section, dot, rest = name.partition(".")
        # A section of distexp gets no value, except a mapping.
        is_section = name in FOREIGN and name in keys and value[:1] not in ("", "{", "$")
        is_foreign = is_section or section == "parallel" or section not in keys
        known = name if dot and not is_foreign and name not in keys else name.rpartition(".")[2] if is_foreign else ""
        if equals and (hint := translate(known, value)):
            yield f"{name} is {'a section' if is_section else 'not a key'}{hint}"
            continue
        # The section may not exist, as in ``slurm.partition``.
        has_section = not dot or section in keys or section.startswith(("hydra", "+", "~"))
        is_renamed = section == "parallel" and rest in ALIASES
        wanted = name if has_section and not is_renamed else rest.rpartition(".")[2]
        found = _keys_named(wanted) if equals and name not in keys else []
        if len(found) == 1:
            yield f"{name} is not a key: write {found[0]}={value}"


def _raise_error(message: str) -> NoReturn:
    raise ConfigError(f"{message}: see distexp --help")


def _explain_position(command: str, arguments: Sequence[str]) -> str:
    """Return the error for a command that is not the first argument, as in ``distexp strategy=ddp plan``."""
    typed = list(arguments)
    # The last one, because it may also be the name of a folder behind an option of Hydra.
    previous = ["", *typed]
    del typed[max(i for i, text in enumerate(typed) if text == command and previous[i] not in VALUE_OPTIONS)]
    return f"{command} is a command, which must come first: type {shlex.join(['distexp', command, *typed])}"


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


def _explain_option(argument: str, arguments: Sequence[str], command: Command) -> str:
    """Return the error for an option such as ``--strategy=fsdp``, or ``--strategy`` with its value behind it."""
    option, equals, value = argument.partition("=")
    following = [*arguments[arguments.index(argument) + 1 :], ""][0]
    if not equals:
        value = following if not following.startswith("-") and "=" not in following else ""
    name = option.lstrip("-").replace("-", "_")
    if hint := translate(name, value):
        return f"{option} is not an option{hint}"
    own = OWN_OPTIONS.get(command, ())
    known = sorted({*RUN_OPTIONS, *HYDRA_FLAGS, "--resolve", "--package", *own})
    whole = [f"{full} {shell_quote(value)}" if value else full for full in known if full.startswith(option)]
    written = [f"{key}={value or 'VALUE'}" for key in _keys_named(name)] or whole
    page = f": see distexp{f' {command}' if own else ''} --help"
    hint = f": write {' or '.join(written)}" if written else suggest(option, (*RUN_OPTIONS, *own)) or page
    return f"{option} is not an option{hint}"


def _keys_named(name: str) -> list[str]:
    """Return the keys with a name or an alias in any section; none if there are more than two."""
    keys = known_keys()
    if name in keys:
        return [name]
    if name in ALIASES:
        return [ALIASES[name]]
    ending = sorted(key for key in keys if key.endswith(f".{name}") and not key.startswith("scale."))
    return ending if len(ending) <= 2 else []
