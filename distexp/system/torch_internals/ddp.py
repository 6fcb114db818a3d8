"""Private APIs of DistributedDataParallel: what it sends, and in which buckets."""

from __future__ import annotations

from typing import Any, cast

import torch

from distexp.system.torch_internals.errors import explained


def ddp_communication_dtype(wrapped: Any) -> torch.dtype:
    """Return the data type in which a DistributedDataParallel sends gradients."""
    with explained("DistributedDataParallel._get_ddp_logging_data"):
        hook = wrapped._get_ddp_logging_data().get("comm_hook", "")
        if "bf16" in hook or "fp32" in hook:  # the names of the hooks of torch and of distexp
            return torch.bfloat16 if "bf16" in hook else torch.float32
        return cast("torch.dtype", next(p.dtype for p in wrapped.parameters() if p.requires_grad))


def ddp_bucket_sizes(wrapped: Any) -> list[int]:
    """Return the bytes of the buckets of a DistributedDataParallel, as rebuilt after its first backward pass."""
    with explained("DistributedDataParallel._get_ddp_logging_data"):
        data = wrapped._get_ddp_logging_data()
        text = data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes") or ""
        return [int(size) for size in text.split(",") if size.strip()]
