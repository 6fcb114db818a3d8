"""Error messages of the command line, with hints."""

from __future__ import annotations

import errno
import re

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError
from yaml import MarkedYAMLError, YAMLError

from distexp.cli.durations import explain_duration
from distexp.cli.option_errors import explain_option
from distexp.cli.overrides import home_message, parse, without_plus_prefix
from distexp.cli.suggestions import suggest_key
from distexp.config import ConfigError
from distexp.config.key_info import describe_values, is_key, known_keys
from distexp.config.paths import config_groups, options_of
from distexp.runs.copyable_command import shell_quote
from distexp.runs.full_disk import FULL, NOT_WRITABLE

NEEDS_QUOTES = frozenset("!#&();<=>^`~")
"""Characters that Hydra's grammar accepts only in quotes."""

NO_DIRECTORY = frozenset({errno.EEXIST, errno.ENOTDIR, errno.ENAMETOOLONG})
"""Numbers of the errors of a path at which no directory can be made."""

SPACE = "choose.space"
LISTS_OF_OVERRIDES = ("sweep.cells", SPACE)
"""Keys whose entries are overrides, which need quotes."""

UNQUOTED_OVERRIDE = re.compile(
    r"""
    [\w./@+]+=                      # key
    (?:\[[^\[\]]*\] | [^\[\],]*)   # a list, or one value
    (?:,[^\[\],=]+(?=[,\]]))*      # further values of a sweep
    """,
    re.VERBOSE,
)
"""An override without quotes inside such a list."""

NO_CONFIG_DIR = "Additional config directory"
"""Start of Hydra's message about a folder of ``--config-dir`` that does not exist."""

IN_FILE = re.compile(r"In '([^']+)': ")
"""Start of Hydra's message about a value in a YAML file."""


def explain(error: Exception) -> list[str]:
    """Return the messages of an error of Hydra, of OmegaConf or of distexp."""
    if isinstance(error, ConfigError):
        return error.errors
    if isinstance(error, MissingConfigException):
        return [_explain_missing_option(error)]
    if isinstance(error, YAMLError):
        return [_explain_yaml(error)]
    if isinstance(error, OverrideParseException):
        return [_explain_syntax(str(error.override), _first_line(error))]
    return [_explain_value(error)]


def explain_os_error(error: OSError) -> str:
    """Return the message of an error of the file system, with a hint if a directory cannot be written."""
    place = f" ({error.filename})" if error.filename else ""
    if error.errno in FULL:
        return f"{error.strerror}{place}: free space, or choose another directory with hydra.sweep.dir=DIR"
    if error.errno in NO_DIRECTORY:
        return f"{error.strerror}{place}: choose another directory with hydra.sweep.dir=DIR"
    if error.errno in NOT_WRITABLE:
        return f"{error.strerror}{place}: choose a directory that you can write with hydra.sweep.dir=DIR"
    return str(error)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]


def _explain_yaml(error: YAMLError) -> str:
    """Return the message for a file that cannot be parsed, with its path and the line."""
    mark = error.problem_mark if isinstance(error, MarkedYAMLError) else None
    if mark is None:
        return f"a configuration file is not valid YAML: {_first_line(error)}"
    return f"{mark.name} is not valid YAML in line {mark.line + 1}: {error.problem}"


def _explain_value(error: Exception) -> str:
    text = _first_line(error)
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__ or error.__context__
    if text.startswith(NO_CONFIG_DIR):
        return f"{text}: give an existing folder to --config-dir"
    if not isinstance(cause, OmegaConfBaseException):
        return text
    key = str(cause.full_key or "").partition("[")[0]
    file = IN_FILE.match(text)
    origin = f"{file[1]}.yaml: " if file else ""
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)) and key in config_groups():
        return f"{origin}{_explain_group(key, is_section=file is not None and file[1].startswith(f'{key}/'))}"
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)) and key:
        return f"{origin}{key} is not a key{suggest_key(key, known_keys()) or ': --cfg job prints all keys'}"
    accepted = describe_values(key) if isinstance(cause, ValidationError) else None
    if accepted is not None:
        given = text.removeprefix("Error merging override ").lstrip("+")
        if file:
            given = f"{origin}{key}={cause.value}"
        return f"{given} must be {accepted}{_explain_other_unit(key, str(cause.value))}"
    return text if cause is error else f"{text.rstrip('.:')}: {_first_line(cause)}"


def _explain_group(group: str, *, is_section: bool) -> str:
    """Return the message for a group without keys, which got one.

    Args:
        group: The group.
        is_section: A file of the group got it as its section, because it does not set its package.
    """
    if is_section:
        return f"{group} is a group and not a section: write '# @package _global_' into the first line of the file"
    return f"{group} has no keys: write {group}=OPTION"


def _explain_other_unit(key: str, value: str) -> str:
    """Return the hint for steps in ``profile`` and for a duration such as ``30m``; empty for anything else."""
    if key == "profile" and value.isdecimal():
        return f": for {value} steps write train.profile_steps={value}"
    return explain_duration(key, value)


def _explain_syntax(override: str, reason: str) -> str:
    override = without_plus_prefix(override)
    key, equals, value = override.partition("=")
    if not equals:
        return (
            f"{override} is not KEY=VALUE: write for example strategy=fsdp. Separate several values with commas alone, "
            "as in zero_stage=1,2, and quote a value with spaces"
        )
    if value.startswith("="):
        single = f"{key}={value.lstrip('=') or 'VALUE'}"
        return f"{override} has more than one =: write {shell_quote(single)}"
    if key in LISTS_OF_OVERRIDES and (quoted := _quote_entries(override)):
        return f"{override} needs quotes: write '{quoted}'"
    if value == "~" or value.startswith("~/"):
        return home_message(key, value)
    if (not value.isascii() or NEEDS_QUOTES & set(value)) and not set("'\"[]{}") & set(value):
        quoted = f"{key}='{value}'"
        return f"{override} needs quotes: write {shell_quote(quoted)}"
    unclosed = _unclosed(value)
    cause = f", because {unclosed} is not closed: quote it for the shell: '{key}=...'" if unclosed else f": {reason}"
    return f"{override} cannot be parsed{cause}"


def _unclosed(value: str) -> str:
    """Return the quote or bracket of a value that is not closed, as after a shell has split it; empty if none is."""
    pairs = (("'", "'"), ('"', '"'), ("[", "]"), ("{", "}"))
    return next(
        (
            first
            for first, last in pairs
            if (value.count(first) % 2 if first == last else value.count(first) != value.count(last))
        ),
        "",
    )


def _quote_entries(override: str) -> str | None:
    """Return a list of overrides with each one in quotes; None if it still cannot be parsed."""
    key, _, value = override.partition("=")
    if key == SPACE and not value.startswith("["):
        value = f"[{value}]"
    quoted = f"{key}=" + UNQUOTED_OVERRIDE.sub(lambda found: _quote_override(found[0]), re.sub(r"[\"']", "", value))
    try:
        parse([quoted])
    except OverrideParseException:
        return None
    return quoted


def _quote_override(text: str) -> str:
    """Return an override in quotes. Keys without values after its own values are other entries, and need none."""
    override, comma, last = text.rpartition(",")
    if comma and is_key(last):
        return f"{_quote_override(override)},{last}"
    return f'"{text}"'


def _explain_missing_option(error: MissingConfigException) -> str:
    group, slash, option = (error.missing_cfg_file or "").partition("/")
    if not slash:
        return f"{_first_line(error).partition('. ')[0]}: leave --config-name out"
    return explain_option(group, option, sorted({*options_of(group), *(error.options or [])}))
