"""Categories of kernels, operators and collectives, from their names in a profiler trace."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

MATMUL, OTHER_KERNEL = "matmul", "other kernel"

NCCL = re.compile(r"\b[nr]ccl\w*?Kernel(?:_([A-Za-z]+))?")
"""ncclDevKernel_AllReduce_Sum_f32_RING_LL, ncclSymkDevKernel_AllGather_LL, ncclKernel_... before NCCL 2.19."""
GLOO = "gloo:"
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send_recv")
UNKNOWN_COLLECTIVE = "other"

TRITON = re.compile(r"\btriton_([a-z]+)_")
"""A pointwise kernel of Inductor may have the name of a matrix product, as ``triton_poi_fused_mm_0``."""
TRITON_MATMUL = ("tem", "mm", "bmm")

MATMUL_KERNELS = re.compile(
    r"gemm|gemv|cutlass|wgmma|nvjet|cublas|splitk|xmma|implicit_con|convolve|winograd|wgrad|dgrad|fprop|conv2d|conv_"
    r"|cudnn_generated|cudnn::(?:cnn|fusion|engines)|flash|fmha|attention|_mma_|tensorop|\bmm_|_mm_kernel|mul_mat"
    r"|Cijk_|magma_.*mm",
    re.IGNORECASE,
)
NOT_MATMUL_KERNELS = re.compile(
    r"softmax|elementwise|(?<!splitK)reduce_kernel|layer_norm|multi_tensor|nchwToNhwc|nhwcToNchw"
)

MATMUL_OPERATORS = re.compile(
    r"::_?(?:addmm|mm|bmm|baddbmm|addbmm|mv|addmv|dot|vdot|int_mm|scaled_mm|grouped_mm|addmm_activation)(?:_|$)"
    r"|conv(?:olution|_|\dd|_transpose)|scaled_dot_product|flash_attention|mkldnn_linear|_linear_pointwise|addmm_activ"
)
OPERATOR = re.compile(r"^[a-z_][a-z_0-9]*::")
NOT_COMPUTE = ("c10d::", "_c10d_functional", "autograd::", "torch::autograd", "torch::distributed::autograd")
COMPILED_GRAPH = "CompiledFxGraph"
BACKWARD = "autograd::engine::evaluate_function"


@lru_cache(maxsize=4096)
def kernel_category(name: str) -> str:
    """Return ``matmul`` for matrix products, convolutions and attention, else ``other kernel``."""
    if found := TRITON.search(name):
        return MATMUL if found[1] in TRITON_MATMUL else OTHER_KERNEL
    is_matmul = MATMUL_KERNELS.search(name) and not NOT_MATMUL_KERNELS.search(name)
    return MATMUL if is_matmul else OTHER_KERNEL


@lru_cache(maxsize=4096)
def operator_category(name: str) -> str | None:
    """Return the category of an operator on the CPU, or None if it does not compute, as the wait for a collective."""
    if COMPILED_GRAPH in name:
        return OTHER_KERNEL
    if not OPERATOR.match(name) or name.startswith(NOT_COMPUTE):
        return None
    return MATMUL if MATMUL_OPERATORS.search(name) else OTHER_KERNEL


def nccl_kind(name: str, arguments: Mapping[str, Any]) -> str | None:
    """Return the kind of collective of a kernel of NCCL, as ``all_reduce``; None for another kernel.

    For a generic kernel of NCCL it is the collective that torch requested, if the trace contains it.
    """
    found = NCCL.search(name)
    if found is None:
        return None
    requested = found[1] or ""
    if requested in ("", "Generic"):
        requested = str(arguments.get("Collective name", UNKNOWN_COLLECTIVE))
    return collective_kind(requested)


def collective_kind(name: str) -> str:
    """Return a kind such as ``all_reduce`` for a name such as ``AllReduce`` or ``_allgather_base``."""
    plain = name.replace("_", "").lower().removesuffix("base")
    return next((kind for kind in KINDS if kind.replace("_", "") == plain), name.lower() or UNKNOWN_COLLECTIVE)
