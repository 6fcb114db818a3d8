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
    tensor: int = 1  # workers with the same rows, which share each layer. Their ranks are consecutive.
    slices: int = 1  # workers with the same rows, which share the tokens. Their ranks are consecutive.
    stages: int = 1  # workers with the same rows, which have different blocks. Their ranks are consecutive.

    @property
    def copies(self) -> int:
        """Return how many workers have the same rows."""
        return self.tensor * self.slices * self.stages

    @property
    def data_rank(self) -> int:
        """Return the number of this worker among those with other rows."""
        return self.rank // self.copies

    @property
    def data_parallel(self) -> int:
        """Return how many workers, or groups of workers with the same rows, have their own rows."""
        return self.world_size // self.copies

    @property
    def node(self) -> int:
        """Return the number of this worker's node."""
        return self.rank // self.workers_per_node
