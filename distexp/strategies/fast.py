"""Values of ``kernels=fast`` that several strategies share.

A CPU compiles for minutes and gains little, so nothing is compiled there. Compilation is for GPUs.
"""

from __future__ import annotations

from typing import Any

from distexp.config import Config
from distexp.config.size_checks import several_lengths

FUSED_ADAMW = "FusedAdamW"
"""Class of the optimizer of ``train.fused_update``, as in ``built.optimizer`` of a record."""

FAST_BUCKET_MB = 250.0
"""Size of DDP's buckets if the model is compiled.

Dynamo splits the graph at the ends of the buckets. So large buckets make few graphs. With the default of 25 MB, each
block of BLOOM-560m would be a graph.
"""


def whole_model_values(config: Config) -> dict[str, Any]:
    """Return the fast values of a strategy that runs the whole model on each worker."""
    values: dict[str, Any] = {}
    native = config.engine.name == "native"
    if native and config.precision.name == "bf16":
        values["train.compute_weights"] = "step"
    if native and config.model.task == "image_classification" and config.cluster.device == "cuda":
        values["train.channels_last"] = True
    if config.cluster.device == "cuda":
        values["train.compile"] = "model" if native and not several_lengths(config.dataset) else "blocks"
    return values


def update_values(config: Config) -> dict[str, Any]:
    """Return the fast values of a strategy that supports ``train.fused_update``."""
    is_possible = config.engine.name == "native" and fused_update_error(config) is None
    return {"train.fused_update": True} if is_possible else {}


def fused_update_error(config: Config) -> str | None:
    """Return why ``train.fused_update`` is not possible with this device, optimizer and precision; None if it is."""
    if config.cluster.device != "cuda":
        return f"needs a GPU, but this run is on {config.cluster.device}: leave it out"
    if config.train.optimizer != "adamw":
        return f"is for train.optimizer=adamw, but this run has train.optimizer={config.train.optimizer}: leave it out"
    if config.precision.name == "fp16":
        return "is for precision=fp32 and bf16, but this run has precision=fp16: use precision=bf16, or leave it out"
    return None


def block_values(config: Config) -> dict[str, Any]:
    """Return the fast values of a strategy that gathers the parameters of each block."""
    return {"train.compile": "blocks"} if config.cluster.device == "cuda" else {}
