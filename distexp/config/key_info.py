"""What the schema says of a key: whether there is one of that name, and what values it takes, in words."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from distexp.config import Config
from distexp.config.paths import config_groups

KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
# Examples end in a comma, for "or null" may follow; the last one falls.
MANY = {int: "a list of whole numbers, as in [1,2],", float: "a list of numbers, as in [0.9,0.99],"}


def known_keys() -> set[str]:
    """Every group and every key of the schema, dotted."""
    keys = {*config_groups()}
    for section in fields(Config):
        keys.add(section.name)
        nested: Any = section.default_factory
        if is_dataclass(nested):
            keys |= {f"{section.name}.{inner.name}" for inner in fields(nested)}
    return keys


def values_of(key: str) -> str | None:
    """What a dotted key may be set to, as in ``a whole number or null``; None where the schema has no such key."""
    hint: Any = Config
    for name in key.split("."):
        if not is_dataclass(hint):
            return None
        hint = get_type_hints(hint).get(name)
    return None if hint is None else _in_words(hint).rstrip(",")


def _in_words(hint: Any) -> str:
    if is_dataclass(hint):
        return f"a section: set one of its keys, {', '.join(each.name for each in fields(hint)[:3])} ..."
    if get_origin(hint) in (Union, UnionType):
        kinds = [each for each in get_args(hint) if each is not NoneType]
        return " or ".join([*map(_in_words, kinds), *["null"] * (NoneType in get_args(hint))])
    if get_origin(hint) is list:
        return MANY.get(get_args(hint)[0], "a list, as in [a,b],")
    if get_origin(hint) is dict:
        return "a mapping, as in {key: value},"
    return KINDS.get(hint, "a value")
