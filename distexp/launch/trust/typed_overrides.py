"""The overrides that the user has typed, also those inside ``sweep.cells``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from hydra.core.override_parser.types import Override, QuotedString

from distexp.cli.overrides import is_override, parse

CELLS = "sweep.cells"


def typed_overrides(arguments: Sequence[str]) -> Iterator[Override]:
    """Yield the overrides of a command line, and those inside its ``sweep.cells``."""
    yield from _parse_once(tuple(arguments))


@lru_cache(maxsize=2)
def _parse_once(arguments: tuple[str, ...]) -> list[Override]:
    """Return the overrides of a command line. They are needed for each cell of a sweep."""
    return list(_parse_overrides(arguments))


def _parse_overrides(arguments: Sequence[str]) -> Iterator[Override]:
    for override in parse([text for text in arguments if is_override(text)]):
        yield override
        if key_of(override) == CELLS:
            texts = [text for cell in as_list(override.value()) for text in as_list(cell)]
            yield from parse([text for text in map(as_text, texts) if is_override(text)])


def typed_keys(arguments: Sequence[str]) -> set[str]:
    """Return the keys of the overrides on the command line, and of those inside its ``sweep.cells``."""
    return {key_of(override) for override in typed_overrides(arguments)}


def key_of(override: Override) -> str:
    """Return the key of an override without ``+`` and ``~``."""
    return str(override.get_key_element()).lstrip("+~")


def as_text(value: Any) -> str:
    """Return a value of an override without its quotes."""
    return value.text if isinstance(value, QuotedString) else str(value)


def as_list(value: Any) -> list[Any]:
    """Return a value that is a list; empty for any other."""
    return value if isinstance(value, list) else []
