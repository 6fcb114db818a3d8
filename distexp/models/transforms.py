"""Activation checkpointing and compilation of the blocks or the model, before distribution."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from distexp.config import Config, ConfigError
from distexp.models.blocks import find_blocks, find_units
from distexp.models.dropout import check_dropout
from distexp.models.recomputation import checkpointed
from distexp.system.torch_internals.compilation import (
    allow_graphs_per_function,
    compile_errors,
    compiler_settings,
    limit_stored_activations,
    split_graphs_for_ddp,
)

BACKEND = "inductor"
"""Backend of ``torch.compile``. Tests choose a faster one."""


MODEL_SCOPES = ("model", "graphs")
"""Values of ``train.compile`` that compile the whole model as one graph."""


def transform_blocks(model: nn.Module, config: Config) -> None:
    """Apply ``train.activation_checkpointing`` and ``train.compile`` to the blocks or the model.

    Only ``forward`` of a block or of the model is replaced, so names and parameters stay. The hooks of FSDP
    and ZeRO, which gather parameters, are outside of the recomputed or compiled function.
    """
    check_dropout(model, config)
    if config.train.compiled != "none":
        limit_stored_activations(config.train.activation_budget)
        split_graphs_for_ddp(config.train.compiled in MODEL_SCOPES)
    blocks = _blocks_to_transform(model, config)
    options = _block_options(len(blocks), config)
    for block in blocks:
        forward = block.forward
        if config.train.compiled == "blocks":
            forward = compile_forward(forward, **options)
        if config.train.activation_checkpointing:
            forward = checkpointed(block, forward, in_graph=config.train.compiled in MODEL_SCOPES)
        block.forward = forward
    if config.train.compiled in MODEL_SCOPES:
        _compile_model(model, cuda_graphs=config.train.compiled == "graphs")


def compile_forward(forward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return a compiled function. ``distexp.plan.compiled`` replaces this one."""
    compiled: Callable[..., Any] = torch.compile(forward, backend=BACKEND, **options)
    return compiled


def _block_options(count: int, config: Config) -> dict[str, Any]:
    """Return the options of compiled blocks, and allow as many graphs as they need.

    The blocks of an image model share their code, but not their channels and strides. By default, torch would compile
    the second kind of block for any number of channels, which takes long, gives slow kernels, and may fail. There are
    few shapes, so each gets its graph: with full and with partial micro-batches, in training and in evaluation.
    """
    if config.train.compiled != "blocks" or config.model.task != "image_classification":
        return {}
    allow_graphs_per_function(4 * count)
    return {"dynamic": False}


def _compile_model(model: nn.Module, *, cuda_graphs: bool) -> None:
    """Compile ``forward`` of a model, which also works if DDP wraps the model later.

    Inside of DDP, dynamo splits the graph at the ends of DDP's buckets. So the reduction of a bucket overlaps with the
    backward pass of the next graph. Compiling the DDP module instead would give the same graphs, because dynamo
    skips the code of DDP.
    """
    options: dict[str, Any] = {"mode": "reduce-overhead"} if cuda_graphs and BACKEND == "inductor" else {}
    model.forward = compile_forward(model.forward, fullgraph=True, dynamic=False, **options)


def read_compiled(module: nn.Module) -> str:
    """Return what of a model is compiled, in the terms of ``train.compile``, read from the live module."""
    model = getattr(module, "module", module)  # inside of DDP or DeepSpeed
    settings = compiler_settings(model)
    if settings is not None:
        return "graphs" if settings.get("triton.cudagraphs") else "model"
    return "blocks" if any(compiler_settings(module) is not None for module in model.modules()) else "none"


@contextmanager
def explained_compilation(scope: str) -> Iterator[None]:
    """Raise ConfigError if torch cannot compile the whole model as one graph.

    Args:
        scope: value of ``train.compile``.
    """
    try:
        yield
    except compile_errors() as error:
        summary = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"train.compile={scope} needs a model that torch compiles as one graph, but {type(error).__name__}: "
            f"{summary}. Use train.compile=blocks"
        ) from error


def _blocks_to_transform(model: nn.Module, config: Config) -> list[nn.Module]:
    """Return the blocks; if there are none, the whole model can be compiled, but not checkpointed.

    Checkpointing a whole model recomputes all of it and saves no memory.
    """
    train = config.train
    if train.activation_checkpointing:
        needed_for, alternative = "train.activation_checkpointing=true", "train.activation_checkpointing=false"
        blocks = find_blocks(model, config.fsdp.wrap, needed_for=needed_for, alternative=alternative)
        return [block for _, block in blocks]
    if train.compiled != "blocks":
        return []
    return [block for _, block in find_units(model, config.fsdp.wrap)] or [model]
