"""Sizes of DeepSpeed's buckets that fit the model, for keys that the user left open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SMALLEST_BUCKET = 5_000_000
LARGEST_BUCKET = 500_000_000
"""Limits in elements; the largest is DeepSpeed's default. No bucket is larger than the model."""

LARGEST_PERSISTENT = 100_000
"""Elements up to which stage 3 does not shard a parameter: DeepSpeed's default. It would shard no small model."""


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
    if zero["stage"] == 0:
        return {}
    even = parameters + parameters % 2  # DeepSpeed refuses an odd bucket
    bucket = min(max(parameters // 16, SMALLEST_BUCKET), LARGEST_BUCKET, even)
    fitting = {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    if zero["stage"] == 3:
        live = max(largest, parameters // 4)
        fitting |= {"stage3_prefetch_bucket_size": min(bucket, 50_000_000)}
        fitting |= {"stage3_param_persistence_threshold": min(parameters // 100, LARGEST_PERSISTENT)}
        fitting |= {"stage3_max_live_parameters": live, "stage3_max_reuse_distance": live}
        del fitting["allgather_bucket_size"]
    filled = {key: value for key, value in fitting.items() if key not in zero}
    zero.update(filled)
    return filled


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
