"""A trained model in the Hugging Face layout, whatever distributed it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from distexp.config import ConfigError
from distexp.data.base import TaskData
from distexp.runs.files import replace_atomically
from distexp.runs.run_dir import MODEL

State = dict[str, Tensor]


@runtime_checkable
class Exportable(Protocol):
    """A model of our own that has an equal in transformers."""

    def to_hugging_face(self, state: State) -> tuple[Any, State]:
        """Its equal, on the meta device, and the weights under the names that they have there."""


def check_exportable(model: nn.Module) -> None:
    """Raises ConfigError where a model has no form that ``from_pretrained`` reads."""
    if not hasattr(model, "save_pretrained") and not isinstance(model, Exportable):
        raise ConfigError(
            f"train.save_model=true writes the Hugging Face layout, and {type(model).__name__} is neither a model of "
            "transformers nor has a method to_hugging_face(state): give it one, or set train.save_model=false"
        )


def save_model(
    weights: Iterator[tuple[str, Tensor]], build: Callable[[], nn.Module], data: TaskData, run_dir: Path, rank: int
) -> None:
    """Gathers the weights on rank 0's CPU, one at a time, and writes ``run_dir/model``; a collective.

    Args:
        weights: of an engine; every rank takes part.
        build: makes the model; called on the meta device.
        data: whose tokenizer is written beside the weights.
    """
    state: State = {}
    for name, tensor in weights:
        if rank == 0:
            state[name] = tensor.detach().cpu()
    if rank != 0:
        return
    from transformers.utils import logging

    logging.disable_progress_bar()  # a bar in a log is a thousand lines
    with torch.device("meta"):
        model: Any = build()
    if isinstance(model, Exportable):
        model, state = model.to_hugging_face(state)
    _describe(model, data)
    with replace_atomically(run_dir / MODEL) as folder:
        model.save_pretrained(folder, state_dict=state)
        if data.tokenizer is not None:
            data.tokenizer.save(folder)


def _describe(model: Any, data: TaskData) -> None:
    """Undoes what was set for training alone, and names the tokens that end and fill a text."""
    if data.tokenizer is None:
        return
    model.config.use_cache = True
    for settings in (model.config, model.generation_config):
        settings.bos_token_id = None
        settings.eos_token_id, settings.pad_token_id = data.tokenizer.eos_id, data.tokenizer.pad_id
