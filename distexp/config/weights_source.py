"""Where the weights and the tokenizer of a model come from: a hub id or a folder."""

from __future__ import annotations

from distexp.config import ModelConfig


def weights_source(model: ModelConfig) -> str | None:
    """Return the hub id or folder of the weights and the tokenizer; None if the architecture has none."""
    return model.name if weights_source_key(model) == "name" else model.path


def weights_source_key(model: ModelConfig) -> str:
    """Return the key that holds the weights source: ``name`` if the model lists it, else ``path``."""
    return "name" if "name" in model.keys else "path"


def loads_from_source(model: ModelConfig) -> bool:
    """Return whether a run reads the weights source, for its weights or for its architecture."""
    return model.init == "pretrained" or "name" in model.keys
