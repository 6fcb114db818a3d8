"""Trust in packages: only the command line and the environment give it, never a YAML file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, open_dict

from distexp.config import ConfigError
from distexp.launch.trust.chosen_files import chosen_files
from distexp.launch.trust.typed_overrides import as_list, as_text, key_of, typed_overrides

KEY = "trusted_packages"
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


def _package_names(override: Override) -> Iterator[str]:
    if key_of(override) != KEY or override.is_delete():
        return
    values = override.sweep_iterator() if override.is_sweep_override() else [override.value()]
    for value in values:
        yield from (as_text(name) for name in as_list(value))


def _files_with_key(composed: DictConfig) -> Iterator[Path]:
    return (path for path in chosen_files(composed) if KEY in path.read_text(errors="replace"))
