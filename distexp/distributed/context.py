"""Rank, world size and device of one worker."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import device


@dataclass(frozen=True)
class Context:
    """The position of one worker in its run, its device and the run directory."""

    rank: int
    world_size: int
    local_rank: int
    workers_per_node: int
    nodes: int
    device: device
    run_dir: Path

    @property
    def node(self) -> int:
        """Return the number of this worker's node."""
        return self.rank // self.workers_per_node
