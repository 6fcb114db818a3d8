"""The command line's overrides, mended so that Hydra takes what people type.

Hydra refuses integers, booleans and null as choices of a group ("Config group override must be a
string or a list"), so ``zero_stage=1,2,3`` and ``offload=true,false`` are quoted here, with Hydra's
own parser, before Hydra sees them.
"""

from __future__ import annotations

import difflib
from collections.abc import Container, Iterable, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, QuotedString


def parse(overrides: Sequence[str]) -> list[Override]:
    """Hydra's view of some overrides; OverrideParseException where the grammar refuses one."""
    return OverridesParser.create().parse_overrides(list(overrides))


def quote_choice(text: str, groups: Container[str]) -> str:
    """An override, with the int, float and bool choices quoted where its key is a group.

    OverrideParseException where the grammar refuses it.
    """
    prefix, equals, _ = text.partition("=")
    key = prefix.lstrip("+").split("@", 1)[0].removeprefix("/")
    if not equals or key not in groups:
        return text
    override = parse([text])[0]
    value = override.value()
    if value is None or isinstance(value, (Glob, list)):
        return text  # null means "not chosen", and Hydra knows that by itself
    if override.is_sweep_override():
        return f"{prefix}=" + ",".join(_choice(item) for item in override.sweep_iterator())
    return f"{prefix}={_choice(value)}"


def _choice(value: Any) -> str:
    if isinstance(value, QuotedString):
        value = value.text
    if isinstance(value, bool):
        value = str(value).lower()
    if value is None:
        return "null"
    text = str(value)
    bare = text.replace("_", "").replace("/", "").replace("-", "")
    return text if bare.isalpha() and text not in ("true", "false", "null") else f"'{text}'"


def suggest(wrong: str, known: Iterable[str]) -> str:
    """``; did you mean a or b?``, or nothing where no known name is near."""
    near = difflib.get_close_matches(wrong, list(known), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(near)}?" if near else ""
