"""16-bit copies of the weights for ``train.compute_weights=step``.

Under autocast, every micro-batch casts the fp32 weights again. Here the module computes with copies that are refreshed
once per optimizer step. The optimizer updates the fp32 weights, and checkpoints and exported models contain them.

The gradients of a micro-batch have the type of the copies. They are added to fp32 gradients of the fp32 weights, so
that accumulation loses no digits. A copy costs 2 bytes per parameter, and the gradients of one micro-batch 2 more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from distexp.config import Config
from distexp.system.torch_internals.tensors import copy_tensors


class StepWeights:
    """The copies that a module computes with, in place of its fp32 weights.

    Batch norms keep their fp32 weights, because their statistics are in fp32 too. A weight that several modules share
    has one copy, which they share.

    Args:
        module: the module, before DDP wraps it. Afterwards it has the copies as parameters.
        dtype: data type of the copies.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._masters: dict[int, nn.Parameter] = {}  # by the id of the copy
        self._copies: dict[int, nn.Parameter] = {}  # by the id of the fp32 weight
        self._owners: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        for owner in module.modules():
            if isinstance(owner, _BatchNorm):
                continue
            for name, master in owner.named_parameters(recurse=False, remove_duplicate=False):
                if master.is_floating_point():
                    self._owners.append((owner, name, master, self._shared_copy(master)))
        self._install(copies=True)

    def _shared_copy(self, master: nn.Parameter) -> nn.Parameter:
        if id(master) not in self._copies:
            copy = nn.Parameter(master.detach().to(self.dtype, copy=True), requires_grad=master.requires_grad)
            self._copies[id(master)], self._masters[id(copy)] = copy, master
        return self._copies[id(master)]

    def _install(self, *, copies: bool) -> None:
        for owner, name, master, copy in self._owners:
            setattr(owner, name, copy if copies else master)

    @contextmanager
    def masters(self) -> Iterator[None]:
        """Give the fp32 weights to the module, during the block."""
        self._install(copies=False)
        try:
            yield
        finally:
            self._install(copies=True)

    def refresh(self) -> None:
        """Set the copies to the rounded weights."""
        pairs = [(copy, self._masters[id(copy)]) for copy in self._copies.values()]
        with torch.no_grad():
            copy_tensors([copy for copy, _ in pairs], [master for _, master in pairs])

    def free_gradients(self) -> None:
        """Free the gradients of the copies."""
        for copy in self._copies.values():
            copy.grad = None

    def master_of(self, parameter: Tensor) -> nn.Parameter | None:
        """Return the fp32 weight of a copy; None if the parameter is no copy."""
        return self._masters.get(id(parameter))

    def copy_of(self, master: Tensor) -> nn.Parameter | None:
        """Return the copy of an fp32 weight; None if it has none."""
        return self._copies.get(id(master))

    @torch.no_grad()
    def collect_gradients(self) -> None:
        """Add the gradients of the copies to those of the fp32 weights, and free them."""
        for copy in self._copies.values():
            if copy.grad is not None:
                master = self._masters[id(copy)]
                if master.grad is None:
                    master.grad = copy.grad.to(master.dtype, copy=True)
                else:
                    master.grad.add_(copy.grad)
                copy.grad = None


def copy_weights(module: nn.Module, config: Config) -> StepWeights | None:
    """Give a module 16-bit copies of its weights, if ``train.compute_weights=step``."""
    return StepWeights(module, torch.bfloat16) if config.train.compute_weights == "step" else None
