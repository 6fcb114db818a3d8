"""Sizes of DeepSpeed's buckets that fit the model, for keys that the user left open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MIN_BUCKET_ELEMENTS = 5_000_000
MAX_BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed's default for all models."""

MAX_PREFETCH_ELEMENTS = 50_000_000
"""DeepSpeed's default for all models."""

MAX_PERSISTENT_ELEMENTS = 100_000
"""Size up to which stage 3 does not shard a parameter: DeepSpeed's default. It would shard no small model."""


def fit_buckets(settings: dict[str, Any], parameters: int, largest: int) -> dict[str, int]:
    """Set bucket sizes that the user left open to a sixteenth of the model.

    DeepSpeed's default of 500 million elements can take more memory than a stage saves on a model of that size.

    Args:
        settings: the result of ``effective_config``; changed in place.
        parameters: number of parameters of the model.
        largest: number of elements of its largest parameter.

    Returns:
        The keys and values that were set.
    """
    zero = settings["zero_optimization"]
    fitting = _fitting_sizes(zero["stage"], parameters, largest)
    filled = {key: value for key, value in fitting.items() if key not in zero}
    zero.update(filled)
    return filled


def _fitting_sizes(stage: int, parameters: int, largest: int) -> dict[str, int]:
    """Return the keys of ``zero_optimization`` that a stage uses, with sizes in elements."""
    if stage == 0:
        return {}
    even = parameters + parameters % 2  # DeepSpeed refuses an odd bucket, and a larger one than the model is useless.
    bucket = min(max(parameters // 16, MIN_BUCKET_ELEMENTS), MAX_BUCKET_ELEMENTS, even)
    if stage < 3:
        return {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    live = max(largest, parameters // 4)
    return {
        "reduce_bucket_size": bucket,
        "stage3_prefetch_bucket_size": min(bucket, MAX_PREFETCH_ELEMENTS),
        "stage3_param_persistence_threshold": min(parameters // 100, MAX_PERSISTENT_ELEMENTS),
        "stage3_max_live_parameters": live,
        "stage3_max_reuse_distance": live,
    }


def describe_buckets(fitted: Mapping[str, int], parameters: int) -> str:
    """State what the fitted bucket sizes mean for a model with this number of parameters."""
    bucket = fitted.get("reduce_bucket_size", 0)
    if bucket >= parameters:
        return (
            f"DeepSpeed's reduce_bucket_size={bucket:,} holds the whole model of {parameters:,} parameters: "
            "gradients are reduced once, after the backward pass"
        )
    values = ", ".join(f"{key}={value:,}" for key, value in fitted.items())
    return f"DeepSpeed's buckets are a fraction of the model's {parameters:,} parameters: {values}"
