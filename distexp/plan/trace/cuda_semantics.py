"""What CUDA does differently from a CPU, for operations on fake tensors that are on a CPU.

Autocast has other lists of operations for CUDA, and some kernels keep other tensors for the backward pass.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from distexp.config import Config
from distexp.strategies.optimizer import FusedAdamW, build_optimizer
from distexp.system.torch_internals.tensors import around_backward, count_references, make_fake_mode, replaced_kernels

FP32_OPERATIONS = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh"),
    *("tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm"),
    *("group_norm", "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d"),
    *("hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss"),
    *("soft_margin_loss", "triplet_margin_loss", "binary_cross_entropy_with_logits", "dist", "cdist", "logsumexp"),
)
"""Operations whose 16-bit inputs autocast converts to fp32 on CUDA."""

FP32_RESULTS = {
    **dict.fromkeys(("prod", "sum"), 1),
    **dict.fromkeys(("softmax.int", "log_softmax.int", "cumprod", "cumsum"), 2),
    **dict.fromkeys(("prod.dim_int", "sum.dim_IntList"), 3),
}
"""Operations whose result is in fp32 under autocast on CUDA, and the position of their argument ``dtype``."""


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Use CUDA's lists of operations for autocast on the CPU, during the block."""
    kernels = {name: _with_fp32_inputs(_operation(name)) for name in FP32_OPERATIONS}
    kernels |= {name: _with_fp32_result(_operation(name), position) for name, position in FP32_RESULTS.items()}
    with replaced_kernels(kernels, "AutocastCPU"):
        yield


def _operation(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _is_cast(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)


def _with_fp32_inputs(operation: Any) -> Callable[..., Any]:
    def run(*arguments: Any, **options: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            cast = tree_map(lambda value: value.float() if _is_cast(value) else value, (arguments, options))
            return operation(*cast[0], **cast[1])

    return run


def _with_fp32_result(operation: Any, position: int) -> Callable[..., Any]:
    def run(*arguments: Any, **options: Any) -> Any:
        given = options.get("dtype") is not None or (len(arguments) > position and arguments[position] is not None)
        if _is_cast(arguments[0]) and not given:
            arguments, options = arguments[:position], {**options, "dtype": torch.float32}
        with torch.autocast("cpu", enabled=False):
            return operation(*arguments, **options)

    return run


class CudaFunctions(TorchFunctionMode):
    """Replaces functions whose CUDA kernels keep other tensors than those of the CPU."""

    def __init__(self, on_backward: Callable[[], None], *, on_gpu: bool = True) -> None:
        super().__init__()
        self._on_gpu = on_gpu  # Without a GPU, only the devices of new tensors are replaced.
        self._on_backward = on_backward  # called when a backward pass starts
        self._is_suspended = False

    @contextmanager
    def used(self) -> Iterator[None]:
        """Use the replacements during the block, also in recomputations: ``Tensor.backward`` leaves the mode."""
        with around_backward(lambda: self if self._is_suspended else nullcontext()), self:
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward:
            self._on_backward()
            self._is_suspended = True
            try:
                return func(*args, **kwargs)  # type: ignore[no-untyped-call]
            finally:
                self._is_suspended = False
        if self._on_gpu and func is functional.dropout and not kwargs.get("inplace"):
            return _dropout(*args, **kwargs)
        if self._on_gpu and func is functional.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            # They make real tensors, whose device cannot be that of the traced ones.
            return func(*args, **{**kwargs, "device": None}).to(kwargs["device"])
        return func(*args, **kwargs)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: A002
    """Apply dropout with a mask of bools, which is kept."""
    if not training or not p:
        return input
    output: Tensor = torch.native_dropout(input, p, True)[0]
    return output


def _attention(  # noqa: PLR0917 (the arguments of torch)
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention with the kernel that CUDA takes, or with another one that keeps the same tensors.

    Source: ``sdp_utils.cpp`` of PyTorch, and the kernels that an H200 took with PyTorch 2.11. For bf16 and fp16 it took
    that of cuDNN, which keeps the same as FlashAttention, or as the memory-efficient kernel.
    """
    if {query.dim(), key.dim(), value.dim()} != {4}:  # No fused kernel takes them, on CUDA as on a CPU.
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    # Each kernel keeps its inputs, the output, and a number in fp32 for each query.
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        attn_mask = attn_mask.to(dtype) if attn_mask is not None and attn_mask.is_floating_point() else attn_mask
    size, value_size = query.size(-1), value.size(-1)
    is_learned = attn_mask is not None and attn_mask.requires_grad
    by_cudnn = query.dtype != torch.float32 and max(size, value_size) <= LARGEST_HEAD and not is_learned
    has_fewer_keys = key.size(1) != query.size(1)
    with torch.autocast("cpu", enabled=False):
        given = [tensor for tensor in (query, key, value, attn_mask) if tensor is not None]
        if any(tensor.stride(-1) > 1 for tensor in given) or (has_fewer_keys and not (enable_gqa and by_cudnn)):
            return _unfused_attention(query, key, value, attn_mask, dropout_p, is_causal, scale)
        if attn_mask is None and by_cudnn and size == value_size:
            return _flash_attention(query, key, value, dropout_p, is_causal, scale)
        return _efficient_attention(query, key, value, attn_mask, dropout_p, is_causal, scale)


LARGEST_HEAD = 256
"""Elements of the largest head that FlashAttention and cuDNN take."""


def _unfused_attention(  # noqa: PLR0917
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, is_causal: bool, scale: float | None
) -> Tensor:
    """Compute attention as ``_scaled_dot_product_attention_math`` of PyTorch, which keeps the scores of all tokens."""
    dtype = query.dtype
    query, key, value = query.float(), key.float(), value.float()
    if 1 < key.size(1) < query.size(1):
        groups = query.size(1) // key.size(1)
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if is_causal:
        mask = query.new_ones(query.size(-2), key.size(-2), dtype=torch.bool).tril()
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, float("-inf")).to(dtype)
    factor = math.sqrt(query.size(-1) ** -0.5 if scale is None else scale)
    scores = torch.matmul(query * factor, key.transpose(-2, -1) * factor)
    weights = torch.ops.aten._safe_softmax(scores if mask is None else scores.add_(mask), -1)
    return torch.matmul(_dropout(weights, dropout), value).to(dtype)


def _flash_attention(  # noqa: PLR0917
    query: Tensor, key: Tensor, value: Tensor, dropout: float, is_causal: bool, scale: float | None
) -> Tensor:
    size = query.size(-1)
    padding = -size % 8
    if padding:
        query, key, value = (functional.pad(tensor, (0, padding)) for tensor in (query, key, value))
        scale = size**-0.5 if scale is None else scale
    output: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout, is_causal, scale=scale
    )[0]
    return output[..., :size] if padding else output


def _efficient_attention(  # noqa: PLR0917
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, is_causal: bool, scale: float | None
) -> Tensor:
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.where(mask, 0.0, float("-inf")).to(query.dtype)
        if mask.size(-1) % 8:
            mask = functional.pad(mask, (0, -mask.size(-1) % 8))[..., : mask.size(-1)]
        mask = mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))
    keeps = query.requires_grad or key.requires_grad or value.requires_grad
    output: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, keeps, dropout, is_causal, scale=scale
    )[0]
    return output


def make_optimizer(module: nn.Module, config: Config) -> torch.optim.Optimizer:
    """Return the optimizer of a run, with the kernels that it uses on CUDA."""
    optimizer = build_optimizer(module, config.train, fused=False)
    use_cuda_kernels(config, optimizer)
    return optimizer


def use_cuda_kernels(config: Config, optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer of tensors on the GPU use the kernels that it uses on CUDA."""
    if config.offload.enabled:
        return
    if isinstance(optimizer, FusedAdamW):
        optimizer.update = lambda updates, scale: None  # It reads addresses, and allocates less than 2 MB.
        return
    if hasattr(optimizer, "is_traced"):
        optimizer.is_traced = True
        return
    for group in optimizer.param_groups:
        group.update({"fused": True, "foreach": False} if "betas" in group else {"foreach": True})


# Sums of gradients: autograd adds one gradient to another in place, but not if tensors are fake.


def count_references_to_gradient() -> tuple[int, int]:
    """Return ``count_references`` of a gradient to which only autograd refers, when it adds another one to it."""
    watch = _Watch()
    with make_fake_mode(), watch:
        value = torch.empty(1, requires_grad=True)
        torch.autograd.backward([(value.sin() + value.cos()).sum()])
    (found,) = watch.found
    return found


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the references to each gradient to which another one is added."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add.Tensor and not torch.is_grad_enabled():
            self.found.append(count_references(args[0]))
        return func(*args, **(kwargs or {}))
