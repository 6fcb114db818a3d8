"""What the user has typed, also inside ``sweep.cells``: only this and the environment can trust a package."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from hydra.core.override_parser.types import Override, QuotedString

from distexp.cli.overrides import is_override, parse

CELLS = "sweep.cells"
TRUSTED = "trusted_packages"
VARIABLE = "DISTEXP_TRUSTED_PACKAGES"
"""Environment variable with the names of packages that the user always trusts, separated by commas."""


def typed_overrides(arguments: Sequence[str]) -> list[Override]:
    """Return the overrides of a command line, and those inside its ``sweep.cells``."""
    return _parse_once(tuple(arguments))


@lru_cache(maxsize=2)
def _parse_once(arguments: tuple[str, ...]) -> list[Override]:
    """Return the overrides of a command line. They are needed for each cell of a sweep."""
    found = []
    for override in parse([text for text in arguments if is_override(text)]):
        found.append(override)
        if key_of(override) == CELLS:
            texts = [as_text(text) for cell in _as_list(override.value()) for text in _as_list(cell)]
            found += parse([text for text in texts if is_override(text)])
    return found


def typed_keys(arguments: Sequence[str]) -> set[str]:
    """Return the keys of the overrides on the command line, and of those inside its ``sweep.cells``."""
    return {key_of(override) for override in typed_overrides(arguments)}


def key_of(override: Override) -> str:
    """Return the key of an override without ``+`` and ``~``."""
    return str(override.get_key_element()).lstrip("+~")


def as_text(value: Any) -> str:
    """Return a value of an override without its quotes."""
    return value.text if isinstance(value, QuotedString) else str(value)


def packages_trusted_by_user(arguments: Sequence[str]) -> list[str]:
    """Return the packages that the command line or the environment trusts.

    Args:
        arguments: the command line as Hydra gets it. Overrides of Hydra's configuration are not used, because a file
            can add to them.
    """
    typed = [name for override in typed_overrides(arguments) for name in _package_names(override)]
    return list(dict.fromkeys([*packages_of_environment(), *typed]))


def packages_of_environment() -> list[str]:
    """Return the packages in ``$DISTEXP_TRUSTED_PACKAGES``."""
    return [name for text in os.environ.get(VARIABLE, "").split(",") if (name := text.strip())]


def _package_names(override: Override) -> Iterator[str]:
    if key_of(override) != TRUSTED or override.is_delete():
        return
    values = override.sweep_iterator() if override.is_sweep_override() else [override.value()]
    for value in values:
        yield from map(as_text, _as_list(value))


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
