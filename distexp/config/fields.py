"""Metadata of dataclass fields, which checks, error messages and the reference pages read."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field
from difflib import get_close_matches
from typing import Any, TypeVar

T = TypeVar("T")

METADATA_KEY = "distexp"


@dataclass(frozen=True)
class FieldInfo:
    """Meaning and limits of a field. Limits of a list hold for each of its items."""

    help: str = ""
    unit: str = ""
    null: str = ""  # meaning of null
    choices: tuple[Any, ...] = ()
    at_least: float | None = None
    above: float | None = None
    below: float | None = None
    length: int | None = None  # number of items of a list
    may_be_empty: bool = True  # whether a list may have no items
    example: str = ""
    slurm_only: bool = False
    path: str = ""  # "file", "folder", "checkpoint", or "hub" for a hub id or a folder
    reference: Any = None  # meaning of null with kernels=reference; None: not a key of the group kernels
    id_if_changed: bool = False  # part of the run id only if the value is not the default or reference
    id_of_null: Any = None  # value of the run id for null, if null replaced this default. The value itself has null.
    parts: Mapping[str, str] | None = None  # meaning of the inner keys of a mapping

    @property
    def limits(self) -> str:
        """Return the accepted values, as in ``at least 1``; empty if any value of the type is accepted."""
        choices = (str(value).lower() if isinstance(value, bool) else str(value) for value in self.choices)
        return " or ".join(filter(None, (self._range, ", ".join(choices))))

    @property
    def _range(self) -> str:
        """Return the accepted numbers, as in ``at least 1``; empty if there are no limits."""
        if self.at_least is not None:
            start = f"{self.at_least:g}"
            return f"at least {start}" if self.below is None else f"from {start} to below {self.below:.10g}"
        if self.above is None:
            return ""
        return f"above {self.above:g}" + ("" if self.below is None else f" and below {self.below:g}")

    def find_error(self, value: Any) -> str | None:
        """Return why a value is not accepted, to be printed after ``KEY=VALUE``; None if it is."""
        if isinstance(value, list):
            return self._list_error(value)
        if self._accepts(value):
            return None
        if self.choices and not self._has_range:
            near = get_close_matches(_squeezed(value), map(_squeezed, self.choices), n=1, cutoff=0.8)
            meant = [f". Did you mean {choice}?" for choice in self.choices if _squeezed(choice) in near]
            return f"is not one of {self.limits}{''.join(meant[:1])}"
        if isinstance(value, str):
            return f"must be a number ({self._range}) or {' or '.join(map(str, self.choices))}"
        return f"must be {self.limits}" + (f", or null ({self.null})" if self.null else "")

    def _list_error(self, value: list[Any]) -> str | None:
        if not value and not self.may_be_empty:
            return f"is empty: name at least one, as in {self.example}, or type null ({self.null})"
        if self.length in (None, len(value)) and all(map(self._accepts, value)):
            return None
        count = f"{self.length} numbers" if self.length is not None else "numbers"
        return f"must be {count}, each {self.limits}" + (f", as in {self.example}" if self.example else "")

    @property
    def _has_range(self) -> bool:
        return self.at_least is not None or self.above is not None

    def _accepts(self, value: Any) -> bool:
        if isinstance(value, str) or not self._has_range:
            return not self.choices or value in self.choices
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )


def _squeezed(value: Any) -> str:
    """Return a value in lower case without punctuation, in which names of other programs differ: ``AdamW_8bit``."""
    return "".join(filter(str.isalnum, str(value).lower()))


def key(default: T, help: str = "", **details: Any) -> T:  # noqa: A002
    """Create a dataclass field with a default and its ``FieldInfo``; lists and dicts are copied."""
    metadata = describe(help, **details)
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def describe(help: str, **details: Any) -> Mapping[str, FieldInfo]:  # noqa: A002
    """Return the metadata of a field without a default: ``field(metadata=describe("..."))``."""
    return {METADATA_KEY: FieldInfo(help=help, **details)}


def info_of(spec: Field[Any]) -> FieldInfo:
    """Return the metadata of a field; an empty one if it has none."""
    info: FieldInfo = spec.metadata.get(METADATA_KEY, FieldInfo())
    return info


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``("section.key", value)`` for each value of a nested mapping."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
