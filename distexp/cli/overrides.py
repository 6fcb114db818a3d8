"""Overrides: parsing with Hydra's grammar, and quoting of choices.

Hydra rejects integers, booleans and null as choices of a group ("Config group override must be a string or a list").
So ``zero_stage=1,2,3`` and ``offload=true,false`` are quoted before Hydra parses them.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, QuotedString


def is_override(argument: str) -> bool:
    """Return whether an argument is an override, and not an option or the value of an option."""
    return not argument.startswith("-") and ("=" in argument or argument.startswith("~"))


def parse(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides with Hydra's grammar.

    Raises:
        OverrideParseException: an override does not match the grammar.
    """
    return OverridesParser.create().parse_overrides(list(overrides))


def quote_choice(text: str, groups: Container[str]) -> str:
    """Return an override with its int, float and bool choices quoted, if its key is a group.

    Raises:
        OverrideParseException: the override does not match the grammar.
    """
    prefix, equals, _ = text.partition("=")
    key = prefix.lstrip("+").split("@", 1)[0].removeprefix("/")
    if not equals or key not in groups:
        return text
    override = parse([text])[0]
    value = override.value()
    if value is None or isinstance(value, (Glob, list)):
        return text  # Hydra accepts a bare null, which means "not chosen"
    if override.is_sweep_override():
        return f"{prefix}=" + ",".join(_quote(item) for item in override.sweep_iterator())
    return f"{prefix}={_quote(value)}"


def _quote(value: Any) -> str:
    if isinstance(value, QuotedString):
        value = value.text
    if isinstance(value, bool):
        value = str(value).lower()
    if value is None:
        return "null"
    text = str(value)
    bare = text.replace("_", "").replace("/", "").replace("-", "")
    return text if bare.isalpha() and text not in ("true", "false", "null") else f"'{text}'"
