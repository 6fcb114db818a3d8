"""Reading of JSON objects as dataclasses, with a check of each value, because another program may have written them."""

import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeGuard, TypeVar, Union, get_args, get_origin, get_type_hints

from distexp.system.files import read_or_none

DataclassType = TypeVar("DataclassType")
Reader = Callable[[Any], Any]


class _MismatchError(Exception):
    """A JSON value that does not have the type of an annotation."""


def parse_dataclass(kind: type[DataclassType], raw: Any) -> DataclassType:
    """Make a dataclass from the keys that it knows; a newer distexp may have added others.

    A field may be a dataclass itself, or a list or tuple of them. In a union of dataclasses, ``type`` names the class.
    Raise ValueError if a value has another type, or TypeError if a key without a default is missing.
    """
    if not isinstance(raw, dict):
        raise ValueError(f"{kind.__name__} is {_shown(raw)} and not an object")
    values: dict[str, Any] = {}
    for name, _, read in _fields(kind):  # type: ignore[arg-type]  # mypy does not count a class as hashable
        if name in raw:
            try:
                values[name] = read(raw[name])
            except _MismatchError:
                raise ValueError(f"{name} is {_shown(raw[name])}") from None
    return kind(**values)


def read_dataclass(kind: type[DataclassType], path: Path, *keys: str) -> DataclassType | None:
    """Return a dataclass from a JSON file, or from the value of its keys; None if the file is missing or damaged."""
    try:
        return parse_dataclass(kind, read_or_none(path, *keys))
    except (ValueError, TypeError, KeyError):
        return None


def section_errors(
    kind: type[Any], raw: Any, *, complete: bool, known_only: bool = False, name: str = "config"
) -> Iterator[str]:
    """Yield an error for each value that does not fit a section of the configuration. Missing keys are no errors.

    If the values are not ``complete``, that is resolved, a text or null may stand for each. With ``known_only``, an
    unknown key is an error.
    """
    if not isinstance(raw, dict):
        yield f"{name} is {_shown(raw)} and not a section"
        return
    if known_only:
        yield from (f"{name}.{key} is unknown" for key in raw.keys() - {known.name for known in fields(kind)})
    for key, hint, read in _fields(kind):  # type: ignore[arg-type]
        if key not in raw:
            continue
        value, full_name = raw[key], f"{name}.{key}"
        if _is_dataclass(hint):
            yield from section_errors(hint, value, complete=complete, known_only=known_only, name=full_name)
        elif not _accepts(read, value) and (complete or not (value is None or isinstance(value, str))):
            yield f"{full_name} is {_shown(value)}"


def device_errors(raw: Any, name: str) -> Iterator[str]:
    """Yield why ``memory`` or ``utilization`` is not as in a record: lists with an entry of each device."""
    if not isinstance(raw, dict) or not all(isinstance(entries, list) for entries in raw.values()):
        yield f"{name} is {_shown(raw)}"
        return
    for kind, entries in raw.items():
        yield from (f"{name}.{kind} contains {_shown(entry)}" for entry in entries if not isinstance(entry, dict))


def matches(value: Any, hint: Any) -> bool:
    """Return whether a JSON value has the type of an annotation. A number that was not finite is null."""
    return _accepts(_reader(hint), value)


def _accepts(read: Reader, value: Any) -> bool:
    try:
        read(value)
    except _MismatchError:
        return False
    return True


@cache
def _fields(kind: Any) -> list[tuple[str, Any, Reader]]:
    """Return name, annotation and reader of each field. Reading thousands of records needs them again."""
    hints = get_type_hints(kind)
    return [(known.name, hints[known.name], _reader(hints[known.name])) for known in fields(kind)]


@cache
def _reader(hint: Any) -> Reader:
    """Return the function that makes dataclasses and tuples of a JSON value, or raises _MismatchError.

    It is built once for each annotation, because a report reads thousands of records.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value: value
    if _is_dataclass(hint):
        return partial(parse_dataclass, hint)
    if origin in (list, tuple):
        item = arguments[0] | None if arguments[0] in (int, float) else arguments[0]
        return partial(_read_list, origin, _reader(item))
    if origin is dict:
        return partial(_read_dict, _reader(arguments[1]))
    options = arguments if origin in (Union, types.UnionType) else (hint,)
    by_name = {option.__name__.lower(): option for option in options if _is_dataclass(option)}
    if len(by_name) > 1:
        return lambda value: parse_dataclass(by_name[value["type"]], value)
    kinds = [option for option in options if isinstance(option, type) and not _is_dataclass(option)]
    readers = [_reader(option) for option in options if option not in kinds]
    return partial(_read_one, (*kinds, int) if float in kinds else tuple(kinds), readers)


def _read_list(kind: type, read: Reader, value: Any) -> Any:
    if not isinstance(value, list):
        raise _MismatchError
    return kind(map(read, value))


def _read_dict(read: Reader, value: Any) -> Any:
    if not isinstance(value, dict):
        raise _MismatchError
    return {key: read(content) for key, content in value.items()}


def _read_one(kinds: tuple[type, ...], readers: Sequence[Reader], value: Any) -> Any:
    if isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool)):
        return value
    for read in readers:
        with suppress(_MismatchError):
            return read(value)
    raise _MismatchError


def _is_dataclass(hint: Any) -> TypeGuard[type[Any]]:
    return isinstance(hint, type) and is_dataclass(hint)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def number_of(entry: Mapping[str, Any], key: str) -> float | None:
    """Return a number of an entry; None if it is missing or not a number."""
    value = entry.get(key)
    return float(value) if value is not None and matches(value, float) else None


def texts_of(entry: Mapping[str, Any], key: str) -> list[str]:
    """Return the texts of an entry, which may be one text or a list."""
    value = entry.get(key)
    listed = value if isinstance(value, list) else [value]
    return [text for text in listed if isinstance(text, str) and text]


TRIAL_PHASES = ("compiling", "search")
"""Phases before a training, in which other processes try something."""

UNCOUNTED_CPU_PHASES = frozenset({*TRIAL_PHASES, "profile", "done"})
"""Phases that do not count for CPU memory.

The trials are no part of the training, and the profiler needs memory itself. In ``done`` the processes end, so memory
that they shared may count several times.
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


OTHER_MIB = 256.0  # GPU memory of other processes that counts; a display or a monitor takes less


def gpu_peak_mib(entry: Mapping[str, Any]) -> float | None:
    """Return the peak of a GPU in an entry of ``memory["gpu"]``, in MiB; None if it was not measured.

    If other processes held memory of the GPU, it is that of the run's own processes, if NVML lists them. Raise
    TypeError or ValueError.
    """
    peak, own = (next(iter(device_values([entry], key)), None) for key in ("peak_mib", "job_peak_mib"))
    return own if peak and own and peak - own >= OTHER_MIB else peak


def is_shared_gpu(entry: Mapping[str, Any]) -> bool:
    """Return whether other processes held memory of a GPU at the peak. Raise TypeError or ValueError."""
    return gpu_peak_mib(entry) != next(iter(device_values([entry], "peak_mib")), None)


def gpu_peaks_mib(memory: Mapping[str, Any]) -> list[float]:
    """Return the peak of each GPU in MiB, of those that were measured."""
    return [peak for entry in memory.get("gpu") or () if (peak := gpu_peak_mib(entry)) is not None]
