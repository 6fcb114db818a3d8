"""Gradients of average pooling, which some versions of torch compute wrong, without an error."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from distexp.system.torch_internals.tensors import explained

repaired: list[Any] = []
"""What replaces kernels of torch, for as long as the process runs."""


def repair_kernel(device: torch.device) -> None:
    """Let gradients of padded, channels-last images be right on a GPU; for this process.

    CUDA's kernel ignores the padding in some versions, such as torch 2.11 (pytorch/pytorch#188344).
    """
    if not repaired and not has_right_kernel(device):
        library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():  # of a replaced kernel
            warnings.simplefilter("ignore")
            library.impl("avg_pool2d_backward", backward_of_contiguous, "CUDA", allow_override=True)
        repaired.append(library)


def has_right_kernel(device: torch.device) -> bool:
    """Return whether both memory formats of padded images have the same gradients."""
    gradients: list[Tensor] = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        images = torch.ones(1, 2, 4, 4, device=device).contiguous(memory_format=memory_format).requires_grad_()
        pooled = functional.avg_pool2d(images, kernel_size=2, stride=1, padding=1)
        gradients += torch.autograd.grad(pooled.sum(), images)
    return torch.equal(*gradients)


def backward_of_contiguous(gradient: Tensor, images: Tensor, *options: Any) -> Tensor:
    """Return the gradient of images, computed in the contiguous format, in the format of the images.

    Args:
        gradient: Gradient of the pooled images, shape (batch, channels, height, width).
        images: The images. Their values are not used.
        options: The other arguments of ``aten::avg_pool2d_backward``.
    """
    found = torch.empty_like(images, memory_format=torch.contiguous_format)
    run: Callable[..., Any] = torch.ops.aten.avg_pool2d_backward.grad_input
    run(gradient.contiguous(), images.contiguous(), *options, grad_input=found)
    is_last = images.dim() == 4 and images.is_contiguous(memory_format=torch.channels_last)
    return found.contiguous(memory_format=torch.channels_last) if is_last else found


def repair_compiled() -> None:
    """Let compiled code call the kernel of eager code for windows that hang over the edge; for this process.

    Inductor divides by the whole window where ``ceil_mode`` counts the padding (pytorch/pytorch#198119).
    """
    with explained("torch._inductor.lowering.lowerings"):
        from torch._inductor import lowering

        operator = torch.ops.aten.avg_pool2d_backward.default
        compiled, eager = lowering.lowerings[operator], lowering.fallback_avg_pool2d_backward

    def lower(gradient: Any, images: Any, *options: Any) -> Any:
        ceil_mode, counts_padding = options[3:5]
        return (eager if ceil_mode and counts_padding else compiled)(gradient, images, *options)

    if compiled.__qualname__ != lower.__qualname__:  # once
        lowering.lowerings[operator] = lower
