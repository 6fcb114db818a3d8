"""Bytes of the tensors that autograd saves for the backward pass: the activations of a micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor


def storage_sizes(tensors: Iterator[Tensor]) -> dict[int, int]:
    """Return the bytes of each storage of some tensors on this rank, by address. Views share one storage."""
    storages = (_local(tensor).untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


@torch.no_grad()
def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class SavedTensorCounter:
    """Counter of the bytes that the forward passes of a module save for their backward passes.

    Parameters do not count, also if they are gathered for the forward pass only.

    Attributes:
        peak_bytes: Most bytes that one forward pass saved.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._saved: set[int] = set()  # addresses of the storages of this forward pass
        self._bytes = 0  # of these storages
        self._parameters: list[set[int]] = []  # storages of the parameters of each module that runs now
        self._in_backward = False

    @contextmanager
    def count(self, module: nn.Module) -> Iterator[None]:
        """Count what is saved during the block."""
        with ExitStack() as stack:
            for submodule in module.modules():
                stack.callback(submodule.register_forward_pre_hook(self._enter).remove)
                stack.callback(submodule.register_forward_hook(self._leave, always_call=True).remove)
            stack.enter_context(saved_tensors_hooks(self._pack, self._unpack))
            yield

    def _enter(self, module: nn.Module, *_: Any) -> None:
        self._parameters.append(set(storage_sizes(module.parameters())))

    def _leave(self, *_: Any) -> None:
        self._parameters.pop()

    def _pack(self, tensor: Tensor) -> Tensor:
        if self._in_backward:  # the next micro-batch, or a recomputed forward pass
            self._saved, self._bytes, self._in_backward = set(), 0, False
        sizes = storage_sizes(iter([tensor])) if tensor.layout == torch.strided else {}
        for address, size in sizes.items():
            if address not in self._saved and not any(address in parameters for parameters in self._parameters):
                self._saved.add(address)
                self._bytes += size
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        return tensor

    def _unpack(self, tensor: Tensor) -> Tensor:
        self._in_backward = True
        return tensor
