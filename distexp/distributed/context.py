"""Where a worker stands among all: handed to whatever has to know."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import device


@dataclass(frozen=True)
class Context:
    """One worker of a run."""

    rank: int
    world_size: int
    local_rank: int
    workers_per_node: int
    nodes: int
    device: device
    run_dir: Path

    @property
    def node(self) -> int:
        """The node's number."""
        return self.rank // self.workers_per_node
