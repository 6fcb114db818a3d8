"""Export of a trained model in the Hugging Face layout."""

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

StateDict = dict[str, Tensor]


@runtime_checkable
class Exportable(Protocol):
    """A model that can be converted to an equivalent model of transformers."""

    def to_hugging_face(self, state: StateDict) -> tuple[Any, StateDict]:
        """Return the equivalent model on the meta device, and the weights under its names."""


def check_exportable(model: nn.Module) -> None:
    """Raise ConfigError if a model cannot be saved in the Hugging Face layout."""
    if not hasattr(model, "save_pretrained") and not isinstance(model, Exportable):
        raise ConfigError(
            f"train.save_model=true is not supported by {type(model).__name__}, which is not a model of transformers: "
            "add a method to_hugging_face(state) to it, or set train.save_model=false"
        )


def save_model(
    weights: Iterator[tuple[str, Tensor]], build: Callable[[], nn.Module], data: TaskData, run_dir: Path, rank: int
) -> None:
    """Collect the weights on rank 0, and write them to ``run_dir/model``.

    This is a collective. The weights are in rank 0's CPU memory until they are written.

    Args:
        weights: whole parameters and buffers by name, one at a time. Every rank must consume all of them.
        build: builds the model; called on the meta device.
        data: data of the task; its tokenizer is written with the weights.
        run_dir: directory of the run.
        rank: rank of this worker.
    """
    state = _collect(weights, rank)
    if rank != 0:
        return
    from transformers.utils import logging

    logging.disable_progress_bar()  # each update would be a line in the log
    with torch.device("meta"):
        model: Any = build()
    if isinstance(model, Exportable):
        model, state = model.to_hugging_face(state)
    _set_generation_config(model, data)
    with replace_atomically(run_dir / MODEL) as folder:
        model.save_pretrained(folder, state_dict=state)
        if data.tokenizer is not None:
            data.tokenizer.save(folder)


def _collect(weights: Iterator[tuple[str, Tensor]], rank: int) -> StateDict:
    """Return the weights in CPU memory on rank 0; the other ranks only take part in gathering them."""
    state: StateDict = {}
    for name, tensor in weights:
        if rank == 0:
            state[name] = tensor.detach().cpu()
    return state


def _set_generation_config(model: Any, data: TaskData) -> None:
    """Enable the key-value cache, and set the special tokens of the tokenizer."""
    if data.tokenizer is None:
        return
    model.config.use_cache = True
    for settings in (model.config, model.generation_config):
        settings.bos_token_id = None
        settings.eos_token_id, settings.pad_token_id = data.tokenizer.eos_id, data.tokenizer.pad_id
