"""A model that takes no memory yet, and the weights that it begins with.

Rank 0 alone holds the whole model, on its CPU. Every strategy asks for it module by module, so that what
a strategy shards never stands whole on a device, and all strategies begin from the same weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distexp.distributed.context import Context

Owner = tuple[nn.Module, str]


class Blueprint:
    """A model on the meta device, whose parts come to life one after the other.

    Args:
        build: makes the model, on whatever device is torch's default.
        context: where this worker stands.
        broadcast: send rank 0's weights to the other ranks; otherwise every rank builds the model on its CPU.
    """

    def __init__(self, build: Callable[[], nn.Module], context: Context, *, broadcast: bool = True) -> None:
        self._context = context
        self._broadcast = context.world_size > 1 and broadcast
        source = build() if context.rank == 0 or not self._broadcast else None
        self._values: dict[str, Tensor] = {}
        if source is not None:
            self._values = {name: tensor.detach() for name, tensor in _named_tensors(source)}
        with torch.device("meta"):
            self.model = build()
        self._names = {id(tensor): name for name, tensor in _named_tensors(self.model)}
        self._owners: dict[int, list[Owner]] = defaultdict(list)  # tied weights have several
        for module in self.model.modules():
            for attribute, tensor in _own_tensors(module):
                self._owners[id(tensor)].append((module, attribute))

    def materialize(self, module: nn.Module, *, recurse: bool = True) -> None:
        """Gives a module its parameters and buffers, in fp32 on this worker's device.

        Those that are there already stay, so modules may be asked for in any order, all ranks in the same.
        """
        for part in module.modules() if recurse else [module]:
            for _, tensor in _own_tensors(part):
                if tensor.is_meta:
                    self._place(tensor)

    def get_tensor(self, name: str, like: Tensor) -> Tensor:
        """A parameter or buffer whole, on this worker's device; a collective.

        Args:
            name: as in ``named_parameters`` or ``named_buffers``, a tied one by its first name.
            like: says shape and type; may be on the meta device.
        """
        device = self._context.device
        if name in self._values:
            # A copy even on a CPU: what comes to life will be trained.
            tensor = self._values[name].to(device, copy=True).contiguous()
        else:
            tensor = torch.empty_like(like, device=device, memory_format=torch.contiguous_format)
        if self._broadcast:
            # gloo has no booleans.
            dist.broadcast(tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor, src=0)
        return tensor

    def _place(self, empty: Tensor) -> None:
        tensor = self.get_tensor(self._names[id(empty)], empty.detach())
        if isinstance(empty, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=empty.requires_grad)
        for module, attribute in self._owners[id(empty)]:
            # Registered before, so torch puts it where the empty one was.
            setattr(module, attribute, tensor)


def _named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """A module's own parameters and buffers, each by the name of its attribute."""
    own = [*module._parameters.items(), *module._buffers.items()]
    return [(name, tensor) for name, tensor in own if tensor is not None]
