"""``_target_`` is the registry: a dotted name in a YAML file, imported when a run needs it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from distexp.config import ConfigError


def check_target(target: str, trusted: Sequence[str]) -> str | None:
    """The error of a target that lies outside distexp and the packages that the user trusts."""
    package = target.split(".", 1)[0]
    if package == "distexp" or package in trusted:
        return None
    return (
        f"_target_={target} lies outside distexp, and code of other packages runs only when they are named: "
        f"add trusted_packages=[{package}]"
    )


def locate(target: str) -> Any:
    """The object of a dotted name; ConfigError where there is none."""
    module, _, name = target.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"_target_={target} cannot be imported ({error}): correct the name") from error
