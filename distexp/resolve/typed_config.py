"""The typed form of a composed configuration: dataclasses instead of the nodes of OmegaConf."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from omegaconf import DictConfig, MissingMandatoryValue, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from distexp.config import Config, ConfigError

EXAMPLES = {"model.name": " to a hub id or a folder, for example model.name=bigscience/bloom-560m"}
"""Ends of the message for a missing value."""


def without_hydra(composed: DictConfig) -> DictConfig:
    """Return a copy of a composed configuration without its ``hydra`` node."""
    content = composed.copy()
    with open_dict(content):
        content.pop("hydra", None)
    return content


def to_dataclasses(composed: DictConfig) -> Config:
    """Convert a composed configuration to dataclasses.

    Raises:
        ConfigError: a key is unknown, a mandatory value is missing, or a reference cannot be resolved.
    """
    unknown = sorted({*_unknown_keys(composed, Config)} - {"hydra"})
    if unknown:
        raise ConfigError([f"{key} is not a key of the configuration: leave it out" for key in unknown])
    try:
        # Hydra has checked the types. Merging into the schema again would take 20 ms per run.
        values = {spec.name: composed[spec.name] for spec in fields(Config)}
        typed: dict[str, Any] = {
            name: OmegaConf.to_object(value) if OmegaConf.is_config(value) else value for name, value in values.items()
        }
    except MissingMandatoryValue as error:
        missing = ", ".join(sorted(OmegaConf.missing_keys(without_hydra(composed))))
        raise ConfigError(f"{missing} is required: set it{EXAMPLES.get(missing, '')}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0]) from error
    return Config(**typed)


def _unknown_keys(section: DictConfig, schema: Any) -> Iterator[str]:
    """Yield the keys that the user added with a plus and that no dataclass has."""
    known = {spec.name for spec in fields(schema)}
    for key, node in section.items_ex(resolve=False):
        if key not in known:
            yield str(key)
        elif isinstance(node, DictConfig) and is_dataclass(below := OmegaConf.get_type(node)):
            yield from (f"{key}.{name}" for name in _unknown_keys(node, below))
