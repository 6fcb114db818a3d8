"""How stage 3 of ZeRO divides parameters among the ranks, and their shares into sub-groups.

Names in comments are those of DeepSpeed 0.19.8, ``deepspeed/runtime/zero/stage3.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from distexp.config import Config


class Partitions:
    """What ``zero.Init`` leaves of the parameters of each module: this rank's shares, and no whole parameter.

    Attributes:
        order: numbers of the parameters in the order in which they were partitioned (``ds_id``).
        shares: the shares on the GPU. Those of trained parameters exist until the optimizer is built.
    """

    def __init__(self, config: Config) -> None:
        self.order: dict[nn.Parameter, int] = {}
        self.shares: dict[nn.Parameter, Tensor] = {}
        self._on_gpu, self._world_size = not config.offload.enabled, config.cluster.world_size

    def add(self, params: Iterable[nn.Parameter]) -> None:
        """Divide the parameters of a module that are still whole."""
        for param in params:
            if param not in self.order:
                self.order[param] = len(self.order)
                if self._on_gpu:
                    size = share_of(param, self._world_size)
                    self.shares[param] = torch.empty(size, dtype=param.dtype, device=param.device)
                resize_storage(param, 0)


def share_of(param: nn.Parameter, world_size: int) -> int:
    """Return the elements of a parameter that each rank has; the last share is padded."""
    return -(-param.numel() // world_size)


def cut_into_sub_groups(sizes: Sequence[int], limit: int) -> list[int]:
    """Return the elements of the sub-groups of a group of shares (``_create_fp16_sub_groups``)."""
    found = [0]
    for size in sizes:
        if found[-1] >= limit:
            found.append(0)
        found[-1] += size
    return found


def resize_storage(param: nn.Parameter, elements: int) -> None:
    """Give a parameter memory for some elements; 0 frees it."""
    param.untyped_storage().resize_(elements * param.element_size())
