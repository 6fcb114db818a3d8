"""Checks of the ``hydra:`` section of foreign YAML files, because Hydra creates the objects that it names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

SECTIONS = ("launcher", "sweeper", "callbacks", "job_logging", "hydra_logging")
"""Parts of the section from which Hydra creates objects."""

CLASS_KEYS = frozenset({"_target_", "()", "class"})
"""Keys whose value Hydra or ``logging.config`` imports and calls."""

KNOWN_CLASSES = frozenset(
    {
        "hydra_plugins.distexp_plugin.launcher.DistexpLauncher",
        "hydra_plugins.distexp_plugin.sweeper.DistexpSweeper",
        "hydra_plugins.hydra_submitit_launcher.submitit_launcher.LocalLauncher",
        "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher",
        "hydra._internal.core_plugins.basic_launcher.BasicLauncher",
        "hydra._internal.core_plugins.basic_sweeper.BasicSweeper",
        "hydra.experimental.callbacks.LogJobReturnCallback",
        "logging.FileHandler",
        "logging.Formatter",
        "logging.NullHandler",
        "logging.StreamHandler",
    }
)

LOG_FILES = frozenset({"${hydra.runtime.output_dir}/${hydra.job.name}.log", "hydra-${hydra.job.name}.log"})
"""The file names of Hydra's own logging options."""

STREAMS = frozenset({"ext://sys.stdout", "ext://sys.stderr"})
REFERENCE = re.compile(r"\$\{(?:oc\.env:\w+|[\w.]+)\}")
SET_LATER = ("${hydra.runtime.", "${hydra.job.")
"""References to plain values that Hydra sets when a run starts."""


@dataclass(frozen=True)
class UnsafeValue:
    """A value that could run code.

    Attributes:
        key: Its full key.
        value: The value as it is in the file.
        package: Package that the user can trust; None if no trust allows the value.
    """

    key: str
    value: str
    package: str | None = None


def unsafe_values(composed: DictConfig, trusted: Sequence[str]) -> Iterator[UnsafeValue]:
    """Yield the values of the hydra section that could run code of a package that the user does not trust."""
    for section in SECTIONS:
        yield from _search(f"hydra.{section}", composed.hydra, section, trusted)


def _search(key: str, parent: Any, name: Any, trusted: Sequence[str]) -> Iterator[UnsafeValue]:
    if OmegaConf.is_missing(parent, name):
        return
    if OmegaConf.is_interpolation(parent, name):
        raw = _raw_text(parent, name)
        if name in CLASS_KEYS or (raw not in LOG_FILES and not _is_plain_reference(parent, name, raw)):
            yield UnsafeValue(key, raw)
        return
    value = parent[name]
    if isinstance(value, (DictConfig, ListConfig)):
        names = value.keys() if isinstance(value, DictConfig) else range(len(value))
        for child in names:
            yield from _search(f"{key}.{child!s}", value, child, trusted)
    elif value is not None:
        yield from _check_value(key, name if isinstance(name, str) else "", value, trusted)


def _raw_text(parent: Any, name: Any) -> str:
    """Return a value with its interpolations."""
    content: Any = OmegaConf.to_container(parent, resolve=False)
    raw: str = content[name]
    return raw


def _is_plain_reference(parent: Any, name: Any, raw: str) -> bool:
    """Return whether a value with interpolations can only be a plain value, and not a section."""
    if "${" in REFERENCE.sub("", raw):
        return False
    if not REFERENCE.fullmatch(raw):
        return True  # a text with references inside
    try:
        return not OmegaConf.is_config(parent[name])
    except OmegaConfBaseException:
        return raw.startswith(SET_LATER)


def _check_value(key: str, name: str, value: object, trusted: Sequence[str]) -> Iterator[UnsafeValue]:
    text = str(value)
    if name in CLASS_KEYS:
        allowed = name != "()" and text in KNOWN_CLASSES
        package = text.partition(".")[0]
        if not allowed and package not in trusted:
            yield UnsafeValue(key, text, package)
    elif name == "filename" and text not in LOG_FILES:
        yield UnsafeValue(key, text)
    elif text.startswith(("ext://", "cfg://")) and text not in STREAMS:
        package = text.removeprefix("ext://").partition(".")[0]
        if text.startswith("cfg://") or package not in trusted:
            yield UnsafeValue(key, text, None if text.startswith("cfg://") else package)
