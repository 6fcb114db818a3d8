"""Command lines to copy into a shell: bash and Hydra read the same values as in the command of the run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, QuotedString
from hydra.errors import HydraException

from distexp.config.paths import config_groups
from distexp.runs.command_text import format_override

SIMPLE = re.compile(r"[\w./@+~]+=[\w./+-]+", re.ASCII)
"""An override without quotes, brackets and commas, which needs no check."""

SPECIAL = frozenset('"$`\\!\n')
"""Characters that bash does not read literally inside of double quotes."""


def copyable_command(overrides: Iterable[str], *, command: str = "distexp", may_sweep: bool = False) -> str:
    """Return a command line that bash splits into a command and its overrides.

    Args:
        overrides: Overrides and options.
        command: The command, such as ``distexp plan``.
        may_sweep: Whether commas may separate several values. The overrides of a run have one value each.
    """
    return " ".join([command, *(shell_quote(copyable_override(text, may_sweep=may_sweep)) for text in overrides)])


def shell_quote(text: str) -> str:
    """Return a text as bash needs it, in double quotes if it has single ones and bash reads it unchanged."""
    return f'"{text}"' if "'" in text and not SPECIAL & set(text) else shlex.quote(text)


def copyable_override(text: str, *, may_sweep: bool = False) -> str:
    """Return an override that Hydra reads as the original one, without the quotes that it does not need.

    Records keep overrides without quotes. So a value that Hydra would not read as one text gets them back.
    """
    if text.startswith("-") or "=" not in text:
        return text
    plain = format_override(text)
    if "'" not in text and SIMPLE.fullmatch(plain):
        return plain
    original, found = _parse(text), _parse(plain)
    if _is_valid(found, may_sweep) and ("'" not in text or _values(original) == _values(found)):
        return plain
    if _is_valid(original, may_sweep):
        return text
    key, _, value = plain.partition("=")
    return f"{key}={_quote(value)}"


def path_override(key: str, path: Path) -> str:
    """Return an override that sets a key to a path, in quotes if Hydra would read its characters as something else."""
    plain = f"{key}={path}"
    return plain if SIMPLE.fullmatch(plain) else f"{key}={_quote(str(path))}"


def _parse(text: str) -> Override | None:
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException:
        return None


def _is_valid(override: Override | None, may_sweep: bool) -> bool:
    return override is not None and (may_sweep or not override.is_sweep_override())


def _values(override: Override | None) -> list[Any]:
    """Return the values of an override. Those of a group are texts, because ``zero_stage='2'`` is ``zero_stage=2``."""
    if override is None:
        return []
    value: Any = override.value()
    values = list(override.sweep_iterator()) if isinstance(value, ChoiceSweep) else [value]
    is_group = override.get_key_element().lstrip("+~").partition("@")[0] in config_groups()
    return [str(_plain(value)).lower() if is_group else _typed(_plain(value)) for value in values]


def _plain(value: Any) -> Any:
    """Return a value without Hydra's quotes, also inside of lists and mappings."""
    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return {_plain(key): _plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def _typed(value: Any) -> tuple[str, Any]:
    """Return a value with its type, so that ``1`` and ``true`` differ."""
    return type(value).__name__, value


def _quote(value: str) -> str:
    """Return a text in Hydra's quotes."""
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", value)
    ending = "\\" * (len(escaped) - len(escaped.rstrip("\\")))
    return f"'{escaped}{ending}'"
