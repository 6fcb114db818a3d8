"""Prefetching of FSDP: how many units are gathered ahead of the one that computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distexp.config import Config

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

TORCH_PREFETCH = {"forward_prefetch": 0, "backward_prefetch": 1}
"""Number of blocks that torch prefetches by default."""


def set_prefetch(units: list[FSDPModule], config: Config) -> None:
    """Set which units are gathered while another one computes. The units are in forward order."""
    ahead, behind = config.fsdp.forward_prefetch, config.fsdp.backward_prefetch
    for position, unit in enumerate(units):
        if ahead:
            unit.set_modules_to_forward_prefetch(units[position + 1 : position + 1 + ahead])
        if behind != TORCH_PREFETCH["backward_prefetch"]:
            unit.set_modules_to_backward_prefetch(units[max(0, position - behind) : position][::-1])
