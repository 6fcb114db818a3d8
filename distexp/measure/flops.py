"""Floating point operations of a training step, and the peak rates of GPUs.

See also ``distexp.models.introspection``, which counts the operations of a forward pass, and
``distexp.resolve.parameter_count``.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from distexp.config import Config
from distexp.config.targets import locate
from distexp.data.base import POSITIONS, TARGET_LABELS, TaskData
from distexp.data.packing import PackedSamples
from distexp.models.introspection import count_forward_flops

BACKWARD_FACTOR = 2
"""A backward pass has two matrix products for each one of the forward pass."""

PEAK_TFLOPS: dict[str, dict[str, float]] = {
    # Dense matrix products, from the datasheets of the SXM modules; fp32 is without TF32.
    "H200": {"bf16": 989.5, "fp16": 989.5, "fp32": 67.0},
    "H100": {"bf16": 989.5, "fp16": 989.5, "fp32": 67.0},
    "A100": {"bf16": 312.0, "fp16": 312.0, "fp32": 19.5},
    "V100": {"fp16": 125.0, "fp32": 15.7},
}


def training_flops(config: Config, data: TaskData) -> float | None:
    """Return the floating point operations to train on one padded sample, without recomputation.

    torch counts them on a copy of the model without memory. Those of a packed row are divided by its samples.

    Returns:
        The count, or None if batches or their logits have no fixed shape.
    """
    dataset = config.dataset
    fixed = dataset.padding == "max_length" and config.train.logits == "all" and not dataset.bucketing
    if config.model.task == "causal_lm" and not fixed:
        return None
    # Flex attention does not run without memory, and all implementations count the same.
    counted = replace(config.model, attention="auto")
    with torch.device("meta"):
        model = locate(config.model._target_)(counted, data.num_classes).eval()
    batch = data.collate([data.train[0]]).to(torch.device("meta"))
    inputs = {name: tensor for name, tensor in batch.inputs.items() if name not in (POSITIONS, TARGET_LABELS)}
    samples = float(data.train.counts.mean()) if isinstance(data.train, PackedSamples) else 1.0
    return (1 + BACKWARD_FACTOR) * count_forward_flops(model, inputs) / samples


def peak_tflops(gpu_name: str | None, precision: str) -> float | None:
    """Return the peak of a GPU in TFLOP/s for a precision, or None if the table does not contain it."""
    for name, peaks in PEAK_TFLOPS.items():
        if gpu_name is not None and name in gpu_name:
            return peaks.get(precision)
    return None
