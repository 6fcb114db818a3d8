"""Memory that kernels of CUDA use for themselves: allocated after their outputs, and freed when they return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

THREADS_PER_BLOCK = 512
WARP = 32
THREADS_PER_MULTIPROCESSOR = 2048
VALUES_PER_THREAD = 16, 256
"""Values that a thread adds, at least and at most, before more blocks share a sum."""

ACCUMULATED_BYTES = 4
"""Sums of 16-bit numbers are in fp32 until they are complete."""

MATRIX_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot")
"""Operations of cuBLAS."""


def is_matrix_product(func: Any) -> bool:
    """Return whether an operation of aten uses cuBLAS, which then allocates its workspace."""
    return func.namespace == "aten" and func.overloadpacket.__name__ in MATRIX_PRODUCTS


@dataclass(frozen=True)
class KernelBuffers:
    """Buffers of the kernels of a GPU.

    Attributes:
        multiprocessors: how many the GPU has. They decide how many blocks share a sum.
    """

    multiprocessors: int

    def sizes(self, func: Any, arguments: Sequence[Any]) -> list[int]:
        """Return the bytes of the buffers of an operation, in the order of their allocation."""
        if func is torch.ops.aten._softmax_backward_data.default:
            return [_bytes_of_product(arguments[0], arguments[1])]
        if func is torch.ops.aten.sum.dim_IntList:
            return self._of_sum(arguments[0], arguments[1])
        return []

    def _of_sum(self, tensor: Tensor, dims: Sequence[int] | None) -> list[int]:
        """Return the buffers of a sum over the first axes of a tensor."""
        summed = sorted(axis % tensor.dim() for axis in dims or ())
        if not summed or summed != list(range(len(summed))) or len(summed) == tensor.dim():
            return []
        if not tensor.is_contiguous() or not tensor.is_floating_point() or not tensor.numel():
            return []
        columns = prod(tensor.shape[len(summed) :])
        return self.of_column_sums(tensor.numel() // columns, columns)

    def of_column_sums(self, rows: int, columns: int) -> list[int]:
        """Return the buffers of the sum of each column of a matrix.

        It is ``setReduceConfig`` of torch's ``aten/src/ATen/native/cuda/Reduce.cuh``, for a reduction whose fastest
        axis is kept. If few columns give too few threads, several blocks share a column. They write their sums to a
        buffer, and count in another one which of them is the last.
        """
        vector = next(size for size in (4, 2, 1) if columns % size == 0)
        threads = THREADS_PER_BLOCK // vector
        wide, high = (min(_power_of_two(size), threads) for size in (columns // vector, rows))
        width = min(wide, WARP)
        height = min(high, threads // width)
        width = min(wide, threads // height)
        if rows < min(height * VALUES_PER_THREAD[0], VALUES_PER_THREAD[1]):
            return []  # Each warp sums other columns.
        values = -(-rows // height)
        grid = -(-(columns // vector) // width)
        target = self.multiprocessors * (THREADS_PER_MULTIPROCESSOR // (width * height))
        if values < VALUES_PER_THREAD[1] or grid > target:
            return []
        fewest, most = (-(-values // size) for size in reversed(VALUES_PER_THREAD))
        blocks = max(min(-(-target // grid), most), fewest)
        return [ACCUMULATED_BYTES * columns * blocks * width * vector, 4 * grid] if blocks > 1 else []


def _power_of_two(number: int) -> int:
    """Return the largest power of two that is at most ``number``, or 1."""
    return 1 << max(number.bit_length() - 1, 0)


def _bytes_of_product(left: Tensor, right: Tensor) -> int:
    """Return the bytes of the product of two tensors of one shape."""
    return left.numel() * torch.promote_types(left.dtype, right.dtype).itemsize
