"""Absolute paths: a worker may start in another directory than the command."""

from __future__ import annotations

import os

from distexp.config import Config
from distexp.config.field_info import info_of
from distexp.config.key_info import get_value, schema_fields, set_value
from distexp.config.weights_source import loads_from_source, weights_source_key

BUILT_IN_TOKENIZERS = ("auto", "byte")


def make_paths_absolute(config: Config) -> list[str]:
    """Make all paths absolute; a value that may be a hub id only if the path exists. Return no errors."""
    kinds = {key: info_of(spec).path for key, spec in schema_fields()}
    if loads_from_source(config.model):
        kinds[f"model.{weights_source_key(config.model)}"] = "hub"
    for key, kind in kinds.items():
        value = get_value(config, key)
        if not kind or value is None or (kind == "hub" and value in BUILT_IN_TOKENIZERS):
            continue
        path = os.path.abspath(os.path.expanduser(value))
        if kind != "hub" or os.path.exists(path):
            set_value(config, key, path)
    return []
