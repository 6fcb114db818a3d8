"""Private API of grouped matrix products, which mixture-of-experts models of transformers use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from distexp.system.torch_internals.errors import explained
from distexp.system.torch_internals.modes import replaced_kernels


@contextmanager
def grouped_products_of_any_precision() -> Iterator[None]:
    """Let tensors without values be multiplied in groups in all precisions, during the block.

    The kernels of CUDA and of the CPU multiply bf16, fp16 and fp32. The one for shapes refuses all but bf16.
    """
    with explained("torch._meta_registrations.meta_grouped_mm"):
        from torch._meta_registrations import meta_grouped_mm

    def run(
        first: Tensor,
        second: Tensor,
        offs: Tensor | None = None,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        shapes = meta_grouped_mm(_in_bf16(first), _in_bf16(second), offs, bias, torch.bfloat16)
        return torch.empty_strided(shapes.shape, shapes.stride(), dtype=out_dtype or first.dtype, device=first.device)

    with replaced_kernels({"_grouped_mm": run}, "Meta"):
        yield


def _in_bf16(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=torch.bfloat16, device=tensor.device)
