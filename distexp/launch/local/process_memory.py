"""Refusal of local runs whose processes alone need more memory than this machine has.

Without this check the kernel ends processes, also those of other programs. The values are lower bounds.
"""

from __future__ import annotations

from collections.abc import Iterable

from distexp.config import Config, ConfigError
from distexp.hardware.facts import facts
from distexp.launch.cell import Cell
from distexp.runs.record import INVALID_ID
from distexp.system.cgroups import usable_memory
from distexp.system.units import MIB, format_memory


def refuse_too_many_processes(cells: Iterable[Cell]) -> None:
    """Make cells invalid whose processes do not fit into the memory of this machine.

    Raises:
        ConfigError: if there is one cell only, and it does not fit.
    """
    every = list(cells)
    memory_mib = usable_memory() / MIB
    for cell in every:
        if cell.config is not None and (error := process_memory_error(cell.config, memory_mib)):
            cell.errors = [error]
            cell.config, cell.decided, cell.id = None, cell.config, INVALID_ID
    if len(every) == 1 and every[0].errors:
        raise ConfigError(every[0].errors)


def process_memory_error(config: Config, memory_mib: float) -> str | None:
    """Return why the processes of a local run do not fit into the memory of this machine; None if they fit."""
    cluster = config.cluster
    workers = cluster.workers_per_node or 1
    node_mib = _node_mib(workers)
    if cluster.nodes * node_mib <= memory_mib:
        return None
    total = cluster.nodes * workers
    needed, available = format_memory(cluster.nodes * node_mib), format_memory(memory_mib)
    return (
        f"cluster.nodes={cluster.nodes} x cluster.workers_per_node={workers} starts {total} workers on this "
        f"machine. Their processes need at least {needed} without any model, but it has {available}: "
        f"{_what_fits(workers, memory_mib)}"
    )


def _node_mib(workers: int) -> float:
    """Return the memory of a node with so many workers, before any model."""
    return facts().processes.started_node_mib + workers * facts().processes.started_worker_mib


def _what_fits(workers: int, memory_mib: float) -> str:
    """Return the most nodes that fit, with as many workers each or with one, and what else to use."""
    for per_node in dict.fromkeys((workers, 1)):
        if nodes := int(memory_mib // _node_mib(per_node)):
            fewer = "" if per_node == workers else f" cluster.workers_per_node={per_node}"
            return f"use at most cluster.nodes={nodes}{fewer}, or cluster=slurm on a cluster"
    return "use a larger machine, or cluster=slurm on a cluster"
