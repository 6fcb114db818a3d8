"""Deferred initialization: a model on the meta device, and its weights.

Only rank 0 has the whole model, in CPU memory. Every strategy materializes it module by module. So a
sharded model is never whole on a device, and all strategies start from the same weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor, nn

from distexp.distributed.context import Context
from distexp.distributed.process_group import broadcast_from_rank_0
from distexp.models import shared_weights


class Blueprint:
    """A model on the meta device whose modules can be materialized one at a time.

    Rank 0 sends its weights to the others. Without ``broadcast``, every rank builds the whole model in its CPU memory.
    ``weights_key`` is what random weights depend on, except names, shapes and random numbers. Runs with a common start-
    up make weights with the same key only once. None: each run makes them.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        context: Context,
        *,
        broadcast: bool = True,
        weights_key: str | None = None,
    ) -> None:
        self._context = context
        self._broadcast = context.world_size > 1 and broadcast
        with torch.device("meta"):
            self.model = build()
        tensors = _named_tensors(self.model)
        shapes = " ".join(f"{name}{tuple(tensor.shape)}{tensor.dtype}" for name, tensor in tensors)
        self._weights_key = weights_key and f"{weights_key} {shapes}"
        self._weights = self._initial_weights(build)
        self._names = {id(tensor): name for name, tensor in tensors}
        # Modules and attributes that have a tensor; tied weights have several.
        self._owners: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
        for module in self.model.modules():
            for attribute, tensor in _direct_tensors(module):
                self._owners[id(tensor)].append((module, attribute))

    def _initial_weights(self, build: Callable[[], nn.Module]) -> dict[str, Tensor]:
        """Return the whole parameters and buffers by name, on the ranks that have them."""
        if self._broadcast and self._context.rank != 0:
            return {}
        return shared_weights.make_or_read(
            self._weights_key, lambda: {name: tensor.detach() for name, tensor in _named_tensors(build())}
        )

    def materialize(self, module: nn.Module, *, recurse: bool = True) -> None:
        """Give a module its parameters and buffers, in fp32 on this worker's device.

        Tensors that are already materialized stay. Modules may come in any order, but the order must be
        the same on all ranks, because each tensor is a collective.
        """
        for part in module.modules() if recurse else [module]:
            for _, tensor in _direct_tensors(part):
                if tensor.is_meta:
                    self._replace(tensor)

    def get_tensor(self, name: str, like: Tensor) -> Tensor:
        """Return a whole parameter or buffer on this worker's device, with shape and type of ``like``; a collective.

        A tied weight has the first of its names.
        """
        device = self._context.device
        if name in self._weights:
            # Copy even if the device is the CPU, because training changes the result.
            tensor = self._weights[name].to(device, copy=True).contiguous()
        else:
            tensor = torch.empty_like(like, device=device, memory_format=torch.contiguous_format)
        if self._broadcast:
            broadcast_from_rank_0(tensor)
        return tensor

    def _replace(self, meta_tensor: Tensor) -> None:
        """Replace a meta tensor by a real one in all modules that have it."""
        tensor = self.get_tensor(self._names[id(meta_tensor)], meta_tensor.detach())
        if isinstance(meta_tensor, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=meta_tensor.requires_grad)
        for module, attribute in self._owners[id(meta_tensor)]:
            # The name is registered, so setattr replaces the parameter or buffer.
            setattr(module, attribute, tensor)


def _named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _direct_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """List the parameters and buffers of a module itself, without its children."""
    tensors = [*module._parameters.items(), *module._buffers.items()]
    return [(name, tensor) for name, tensor in tensors if tensor is not None]
