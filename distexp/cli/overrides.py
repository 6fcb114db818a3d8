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
    return _asked(difflib.get_close_matches(wrong, list(known), n=3, cutoff=0.6))


def suggest_key(wrong: str, known: Iterable[str]) -> str:
    """The same for dotted keys, by section and last name: a long section in common makes no two keys alike."""
    alike = sorted(((_likeness(wrong, key), key) for key in known if not _below(wrong, key)), reverse=True)
    near: list[str] = []
    for score, key in alike:
        if score >= max(0.6, alike[0][0] - 0.15) and not any(
            _below(key, other) or _below(other, key) for other in near
        ):
            near.append(key)
    return _asked(near[:3])


def _likeness(wrong: str, key: str) -> float:
    """From 0 to 1. The right name in a wrong section, or in none, is nearly right, and so is a part of a name."""
    (section, _, name), (wrong_section, _, wrong_name) = key.rpartition("."), wrong.rpartition(".")
    part = set(wrong_name.split("_")) < set(name.split("_"))
    by_name = (0.95 if part else _ratio(wrong_name, name)) * (0.8 + 0.2 * _ratio(wrong_section, section))
    return by_name if section and wrong_section else max(by_name, _ratio(wrong, key))


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def _below(key: str, other: str) -> bool:
    return key.startswith((f"{other}.", f"{other}/"))


def _asked(near: Sequence[str]) -> str:
    return f"; did you mean {' or '.join(near)}?" if near else ""
