"""Overrides: parsing with Hydra's grammar, and quoting of choices.

Hydra rejects integers, booleans and null as choices of a group ("Config group override must be a string or a list").
So ``zero_stage=1,2,3`` and ``offload=true,false`` are quoted before Hydra parses them.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, NoReturn

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, QuotedString

from distexp.config import ConfigError

OPEN_SECTIONS = ("model.options", "dataset.options", "strategy.options", "cluster.environment", "cluster.sbatch")
"""Sections to which users add keys."""


def is_override(argument: str) -> bool:
    """Return whether an argument is an override, and not an option or the value of an option."""
    return not argument.startswith("-") and ("=" in argument or argument.startswith("~"))


def add_plus_prefix(override: str) -> str:
    """Mark what adds keys to an open section as new, which Hydra requires: one key, or several as ``{...}``."""
    return f"++{override}" if _is_open(override) else override


def without_plus_prefix(override: str) -> str:
    """Return an override as the user typed it, without the mark of ``add_plus_prefix``."""
    typed = override.removeprefix("++")
    return typed if _is_open(typed) else override


def _is_open(override: str) -> bool:
    return any(override.startswith((f"{section}.", f"{section}={{")) for section in OPEN_SECTIONS)


def parse(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides with Hydra's grammar.

    Raises:
        OverrideParseException: an override does not match the grammar.
    """
    return OverridesParser.create().parse_overrides(list(overrides))


def quote_choice(text: str, groups: Container[str]) -> str:
    """Return an override with its int, float and bool choices quoted, if its key is a group.

    Raises:
        ConfigError: a list is given, of which Hydra would silently use the last option only, or null.
        OverrideParseException: the override does not match the grammar.
    """
    prefix, equals, _ = text.partition("=")
    key = prefix.lstrip("+").split("@", 1)[0].removeprefix("/")
    if not equals or key not in groups:
        return text
    override = parse([text])[0]
    value: Any = override.value()
    if isinstance(value, Glob):
        return text
    values: list[Any] = list(override.sweep_iterator()) if override.is_sweep_override() else [value]
    if None in values:
        raise ConfigError(f"{text} chooses no option of {key}: write {key}=OPTION, or leave it out")
    if any(isinstance(item, list) for item in values):
        _refuse_list(text, key, values)
    return f"{prefix}=" + ",".join(_quote(item) for item in values)


def plain_value(value: Any) -> Any:
    """Return a value of an override without its quotes."""
    return value.text if isinstance(value, QuotedString) else value


def home_message(key: str, value: str) -> str:
    """Return the error for a path with ``~``, which shells replace only at the start of an argument."""
    return f"{key}={value} starts with ~, which the shell does not replace there: write {key}=$HOME{value[1:]}"


def _refuse_list(text: str, group: str, values: Sequence[Any]) -> NoReturn:
    """Raise the error for ``strategy=[ddp,fsdp]``, with the sweep over the same options."""
    options = [_quote(option).strip("'") for item in values for option in (item if isinstance(item, list) else [item])]
    if len(options) > 1:
        hint = f"add --multirun {group}={','.join(options)} to compare them"
    else:
        hint = f"write {group}={options[0] if options else 'OPTION'}"
    raise ConfigError(f"{text} is a list, but {group} takes one option: {hint}")


def _quote(value: Any) -> str:
    value = plain_value(value)
    if isinstance(value, bool):
        value = str(value).lower()
    text = str(value)
    bare = text.replace("_", "").replace("/", "").replace("-", "")
    return text if bare.isalpha() and text not in ("true", "false", "null") else f"'{text}'"
