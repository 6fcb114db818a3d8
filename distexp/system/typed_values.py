"""Reading of JSON objects as dataclasses, with a check of each value, because another program may have written them."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard, TypeVar, Union, get_args, get_origin, get_type_hints

from distexp.system.files import read_or_none

DataclassType = TypeVar("DataclassType")

MEASURED = ("_mib", "_pct", "_j")
"""Ends of the keys whose values are numbers in the entries of devices."""


def parse_dataclass(kind: type[DataclassType], raw: Any) -> DataclassType:
    """Make a dataclass from the keys that it knows; a newer distexp may have added others.

    A field may be a dataclass itself, or a list or tuple of them. In a union of dataclasses, ``type`` names the class.
    Raise ValueError if a value has another type, or TypeError if a key without a default is missing.
    """
    if not isinstance(raw, dict):
        raise ValueError(f"{kind.__name__} is {_shown(raw)} and not an object")
    values: dict[str, Any] = {}
    for known in _fields(kind):
        if known.name in raw:
            value = raw[known.name]
            if not known.fits(value):
                raise ValueError(f"{known.name} is {_shown(value)}")
            values[known.name] = value if known.convert is None else known.convert(value)
    return kind(**values)


def read_dataclass(kind: type[DataclassType], path: Path, *keys: str) -> DataclassType | None:
    """Return a dataclass from a JSON file, or from the value of its keys; None if the file is missing or damaged."""
    try:
        return parse_dataclass(kind, read_or_none(path, *keys))
    except (ValueError, TypeError, KeyError):
        return None


def section_errors(kind: type[Any], raw: Any, *, complete: bool, name: str = "config") -> Iterator[str]:
    """Yield an error for each value that does not fit a section of the configuration. Missing keys are no errors.

    If the values are not ``complete``, that is resolved, a text or null may stand for each.
    """
    if not isinstance(raw, dict):
        yield f"{name} is {_shown(raw)} and not a section"
        return
    for known in _fields(kind):
        if known.name not in raw:
            continue
        value, full_name = raw[known.name], f"{name}.{known.name}"
        if known.is_section:
            yield from section_errors(known.hint, value, complete=complete, name=full_name)
        elif not known.fits(value) and (complete or not (value is None or isinstance(value, str))):
            yield f"{full_name} is {_shown(value)}"


def device_errors(raw: Any, name: str) -> Iterator[str]:
    """Yield an error for each value of ``memory`` or ``utilization`` that is not as in a record."""
    if not isinstance(raw, dict) or not all(isinstance(entries, list) for entries in raw.values()):
        yield f"{name} is {_shown(raw)}"
        return
    for kind, entries in raw.items():
        for entry in entries:
            yield from (f"{name}.{kind} {problem}" for problem in _entry_errors(entry))


def _entry_errors(entry: Any) -> Iterator[str]:
    """Yield what is wrong with the entry of one device, rank or node."""
    if not isinstance(entry, dict):
        yield f"contains {_shown(entry)}"
        return
    for key, value in entry.items():
        if isinstance(value, dict):
            yield from _entry_errors(value)
        elif (key.endswith(MEASURED) or key in ("node", "index", "rank")) and not matches(value, float | None):
            yield f"has {key}={_shown(value)}"


def matches(value: Any, hint: Any) -> bool:
    """Return whether a JSON value has the type of an annotation. A number that was not finite is null."""
    return _check(hint)(value)


@cache
def _check(hint: Any) -> Callable[[Any], bool]:
    """Return the function that checks the values of an annotation.

    It is built once for each annotation, because a report reads thousands of records.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return partial(_fits_one, [_check(argument) for argument in arguments])
    if origin in (list, tuple):
        return partial(_fits_list, _check(arguments[0] | None if arguments[0] in (int, float) else arguments[0]))
    if origin is dict:
        return partial(_fits_dict, _check(arguments[1]))
    if hint in (int, float):
        return partial(_fits_number, int if hint is int else (int, float))
    if _is_dataclass(hint):
        return lambda value: True  # The conversion checks it.
    return lambda value: hint is Any or isinstance(value, hint)


@cache
def _converter(hint: Any) -> Callable[[Any], Any] | None:
    """Return the function that makes dataclasses and tuples of a JSON value; None if the value stays as it is."""
    origin, arguments = get_origin(hint), get_args(hint)
    if _is_dataclass(hint):
        return partial(parse_dataclass, hint)
    if origin in (list, tuple):
        convert = _converter(arguments[0])
        if origin is list and convert is None:
            return None
        return lambda values: origin(values if convert is None else map(convert, values))
    kinds = list(filter(_is_dataclass, arguments))
    if origin not in (Union, types.UnionType) or not kinds:
        return None
    if len(kinds) == 1:
        return lambda value: None if value is None else parse_dataclass(kinds[0], value)
    by_name = {kind.__name__.lower(): kind for kind in kinds}
    return lambda value: parse_dataclass(by_name[value["type"]], value)


def _fits_list(fits_item: Callable[[Any], bool], value: Any) -> bool:
    return isinstance(value, list) and all(map(fits_item, value))


def _fits_dict(fits_item: Callable[[Any], bool], value: Any) -> bool:
    return isinstance(value, dict) and all(map(fits_item, value.values()))


def _fits_number(kinds: type | tuple[type, ...], value: Any) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def _fits_one(checks: Sequence[Callable[[Any], bool]], value: Any) -> bool:
    for check in checks:  # noqa: SIM110  # any() takes twice as long
        if check(value):
            return True
    return False


def _is_dataclass(hint: Any) -> TypeGuard[type[Any]]:
    return isinstance(hint, type) and is_dataclass(hint)


class _Field(NamedTuple):
    """A field of a dataclass, with the check of its values. Reading thousands of records needs both again."""

    name: str
    hint: Any
    fits: Callable[[Any], bool]
    convert: Callable[[Any], Any] | None
    is_section: bool


def _fields(kind: Any) -> tuple[_Field, ...]:
    """Return the fields of a dataclass. mypy does not take a class for an argument of a cached function."""
    return _cached_fields(kind)


@cache
def _cached_fields(kind: Any) -> tuple[_Field, ...]:
    all_hints = get_type_hints(kind)
    hints = [(known.name, all_hints[known.name]) for known in fields(kind)]
    return tuple(_Field(name, hint, _check(hint), _converter(hint), _is_dataclass(hint)) for name, hint in hints)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# Values of a record's free-form entries, which another program may have written.


def number_of(entry: Mapping[str, Any], key: str) -> float | None:
    """Return a number of an entry; None if it is missing or not a number."""
    value = entry.get(key)
    return float(value) if value is not None and matches(value, float) else None


def texts_of(entry: Mapping[str, Any], key: str) -> list[str]:
    """Return the texts of an entry, which may be one text or a list."""
    value = entry.get(key)
    listed = value if isinstance(value, list) else [value]
    return [text for text in listed if isinstance(text, str) and text]


# Values of a record's entries for each GPU, rank or node.

UNCOUNTED_CPU_PHASES = frozenset({"search", "profile", "done"})
"""Phases that do not count for CPU memory.

The search tries sizes that are not chosen, and the profiler needs memory itself. In ``done`` the processes end, so
memory that they shared may count several times.
"""


def device_values(entries: Iterable[Mapping[str, Any]] | None, key: str) -> list[float]:
    """Return the measured values of a key in entries such as ``memory["gpu"]``. Raise TypeError or ValueError."""
    return [float(entry[key]) for entry in entries or () if entry.get(key) is not None]


def mean_or_none(values: Iterable[float]) -> float | None:
    """Return the mean; None if there are no values."""
    known = list(values)
    return sum(known) / len(known) if known else None


def cpu_peak_mib(memory: Mapping[str, Any]) -> float | None:
    """Return the largest CPU memory of a node in the phases that count, in MiB; None if it was not measured."""
    return max(device_values(memory.get("cpu"), "peak_mib"), default=None)
