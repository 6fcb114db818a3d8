"""Absolute paths: a worker may start in another directory than the command."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distexp.config import Config
from distexp.config.model_checks import loads_from_source, weights_source_key


def make_paths_absolute(config: Config) -> Iterator[str]:
    """Make all paths absolute; values that may be hub ids only if the path exists."""
    for key in ("train_path", "eval_path", "root"):
        _make_absolute(config.dataset, key)
    _make_absolute(config.deepspeed, "config_file")
    _make_absolute(config.train, "resume")
    _make_absolute(config.dataset, "path", may_be_hub_id=True)
    if config.model.tokenizer not in ("auto", "byte"):
        _make_absolute(config.model, "tokenizer", may_be_hub_id=True)
    if loads_from_source(config.model):
        _make_absolute(config.model, weights_source_key(config.model), may_be_hub_id=True)
    yield from ()


def _make_absolute(section: Any, key: str, *, may_be_hub_id: bool = False) -> None:
    value = getattr(section, key)
    if value is not None and (not may_be_hub_id or Path(value).expanduser().exists()):
        setattr(section, key, os.path.abspath(os.path.expanduser(value)))
