"""Imports of ``_target_`` names: dotted names in YAML files, imported when a run needs them."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from distexp.config import ConfigError
from distexp.config.custom_code import check_callable, shorten_errors


def check_target(target: str, trusted: Sequence[str]) -> str | None:
    """Return an error if a target is neither in distexp nor in a package that the user trusts."""
    package = target.split(".", 1)[0]
    if package == "distexp" or package in trusted:
        return None
    return f"_target_={target} is outside distexp: add trusted_packages=[{package}] to allow code of that package"


def locate(target: str) -> Any:
    """Import a dotted name and return the function or class.

    Raises:
        ConfigError: the name cannot be imported, or names something else.
    """
    module, _, name = target.rpartition(".")
    try:
        with shorten_errors(target, "its import"):
            found = getattr(importlib.import_module(module), name)
    except ConfigError as error:
        if isinstance(error.__cause__, (ImportError, AttributeError, ValueError)):
            raise _import_error(target, error.__cause__) from error.__cause__
        raise
    except (ImportError, AttributeError, ValueError) as error:
        raise _import_error(target, error) from error
    check_callable(found, f"_target_={target}")
    return found


def _import_error(target: str, error: BaseException) -> ConfigError:
    return ConfigError(f"_target_={target} cannot be imported ({error}): correct the name")
