"""Trust in packages: only the command line and the environment give it, never a YAML file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override, QuotedString
from omegaconf import DictConfig, open_dict

from distexp.cli.overrides import is_override, parse
from distexp.config import ConfigError

KEY = "trusted_packages"
CELLS = "sweep.cells"
VARIABLE = "DISTEXP_TRUSTED_PACKAGES"
"""Environment variable with the names of packages that the user always trusts, separated by commas."""


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


def check_trust(composed: DictConfig, allowed: Sequence[str]) -> None:
    """Check that no file trusts a package, and add the packages of the environment to ``trusted_packages``.

    Args:
        composed: the composed configuration of a cell, with the hydra node.
        allowed: the packages that the user trusts.

    Raises:
        ConfigError: the cell trusts a package that the user does not trust.
    """
    wanted = [str(name) for name in composed[KEY]]
    refused = [name for name in wanted if name not in allowed]
    if refused:
        shown = f"{KEY}=[{','.join(refused)}]"
        source = next(_files_with_key(composed), None)
        origin = f"is set by {source}" if source else "is not from the command line"
        raise ConfigError(
            f"{shown} {origin}, but a file cannot trust a package: if you trust its code, add {shown} to the command"
        )
    with open_dict(composed):
        composed[KEY] = list(dict.fromkeys([*wanted, *packages_of_environment()]))


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
            texts = [text for cell in _as_list(override.value()) for text in _as_list(cell)]
            yield from parse([text for text in map(as_text, texts) if is_override(text)])


def _package_names(override: Override) -> Iterator[str]:
    if key_of(override) != KEY or override.is_delete():
        return
    values = override.sweep_iterator() if override.is_sweep_override() else [override.value()]
    for value in values:
        yield from (as_text(name) for name in _as_list(value))


def key_of(override: Override) -> str:
    """Return the key of an override without ``+`` and ``~``."""
    return str(override.get_key_element()).lstrip("+~")


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def as_text(value: Any) -> str:
    """Return a value of an override without its quotes."""
    return value.text if isinstance(value, QuotedString) else str(value)


def typed_keys(arguments: Sequence[str]) -> set[str]:
    """Return the keys of the overrides on the command line, and of those inside its ``sweep.cells``."""
    return {key_of(override) for override in typed_overrides(arguments)}


def source_folders(composed: DictConfig) -> list[Path]:
    """Return the folders of YAML files that Hydra searches."""
    return [Path(source.path) for source in composed.hydra.runtime.config_sources if source.schema == "file"]


def chosen_files(composed: DictConfig) -> Iterator[Path]:
    """Yield the YAML files of the chosen options, and the primary file."""
    choices = composed.hydra.runtime.choices.items()
    names = [f"{group}/{option}.yaml" for group, option in choices if isinstance(option, str)]
    for path in (folder / name for folder in source_folders(composed) for name in names):
        if path.is_file():
            yield path
    yield from (path for folder in source_folders(composed) if (path := _primary_file(folder, composed)).is_file())


def _primary_file(folder: Path, composed: DictConfig) -> Path:
    return folder / f"{composed.hydra.job.config_name}.yaml"


def _files_with_key(composed: DictConfig) -> Iterator[Path]:
    return (path for path in chosen_files(composed) if KEY in path.read_text(errors="replace"))
