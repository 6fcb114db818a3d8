"""Reading of JSON objects as dataclasses, with a check of each value, because another program may have written them."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

DataclassType = TypeVar("DataclassType")

MEASURED = ("_mib", "_pct", "_j")
"""Ends of the keys whose values are numbers in the entries of devices."""

DEVICE_KEYS = ("node", "index", "rank")


def typed(kind: type[DataclassType], raw: Any) -> DataclassType:
    """Make a dataclass from the keys that it knows; a newer distexp may have added others.

    Raises:
        ValueError: if a value has another type.
        TypeError: if a key without a default is missing.
    """
    if not isinstance(raw, dict):
        raise ValueError(f"{kind.__name__} is {_shown(raw)} and not an object")
    known = {each.name: raw[each.name] for each in _fields(kind) if each.name in raw}
    for each in _fields(kind):
        if each.name in known and not each.fits(known[each.name]):
            raise ValueError(f"{each.name} is {_shown(known[each.name])}")
    return kind(**known)


def section_errors(kind: type[Any], raw: Any, *, complete: bool, name: str = "config") -> Iterator[str]:
    """Yield an error for each value that does not fit a section of the configuration. Missing keys are no errors.

    Args:
        kind: Dataclass of the section.
        raw: Its values.
        complete: Whether the values are resolved. If not, a text may stand for each value.
        name: Key of the section.
    """
    if not isinstance(raw, dict):
        yield f"{name} is {_shown(raw)} and not a section"
        return
    for each in _fields(kind):
        if each.name not in raw:
            continue
        value = raw[each.name]
        if each.is_section:
            yield from section_errors(each.hint, value, complete=complete, name=f"{name}.{each.name}")
        elif not (each.fits(value) or _may_be_open(value, each.hint, complete=complete)):
            yield f"{name}.{each.name} is {_shown(value)}"


def _may_be_open(value: Any, hint: Any, *, complete: bool) -> bool:
    """Return whether a value may stand for one of another type.

    Earlier versions had null for more keys, and texts such as ``auto`` for optional numbers.
    """
    if isinstance(value, str):
        return not complete or (type(None) in get_args(hint) and not _is_container(hint))
    return value is None and (hint is not bool or not complete)


def _is_container(hint: Any) -> bool:
    return any(get_origin(each) in (list, dict) for each in get_args(hint))


def device_errors(raw: Any, name: str) -> Iterator[str]:
    """Yield an error for each value of ``memory`` or ``utilization`` that is not as in a record."""
    if not isinstance(raw, dict) or not all(isinstance(entries, list) for entries in raw.values()):
        yield f"{name} is {_shown(raw)}"
        return
    for kind, entries in raw.items():
        for entry in entries:
            if not isinstance(entry, dict):
                yield f"{name}.{kind} contains {_shown(entry)}"
                continue
            yield from (f"{name}.{kind} has {key}={_shown(value)}" for key, value in _wrong_numbers(entry))


def matches(value: Any, hint: Any) -> bool:
    """Return whether a JSON value has the type of an annotation. A number that was not finite is null."""
    return _check(hint)(value)


@cache
def _check(hint: Any) -> Callable[[Any], bool]:
    """Return the function that checks the values of an annotation."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        checks = [_check(argument) for argument in arguments]
        return partial(_fits_one, checks)
    if origin is list:
        item = arguments[0]
        fits = _check(item | None if item in (int, float) else item)
        return lambda value: isinstance(value, list) and all(map(fits, value))
    if origin is dict:
        fits = _check(arguments[1])
        return lambda value: isinstance(value, dict) and all(map(fits, value.values()))
    if hint in (int, float):
        numbers = int if hint is int else (int, float)
        return lambda value: isinstance(value, numbers) and not isinstance(value, bool)
    return lambda value: hint is Any or isinstance(value, hint)


def _fits_one(checks: Sequence[Callable[[Any], bool]], value: Any) -> bool:
    for check in checks:  # noqa: SIM110  # any() takes twice as long
        if check(value):
            return True
    return False


def _wrong_numbers(entry: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in entry.items():
        if isinstance(value, dict):
            yield from _wrong_numbers(value)
        elif (key.endswith(MEASURED) or key in DEVICE_KEYS) and not matches(value, float | None):
            yield key, value


class _Field(NamedTuple):
    """A field of a dataclass, with what thousands of records need again."""

    name: str
    hint: Any
    fits: Callable[[Any], bool]
    is_section: bool


def _fields(kind: Any) -> tuple[_Field, ...]:
    return _cached_fields(kind)


@cache
def _cached_fields(kind: Any) -> tuple[_Field, ...]:
    hints = get_type_hints(kind)
    return tuple(
        _Field(each.name, hint, _check(hint), isinstance(hint, type) and is_dataclass(hint))
        for each in fields(kind)
        for hint in [hints[each.name]]
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
