"""Detection of processes that the kernel killed for memory during a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from distexp.runs.json_files import write_json
from distexp.runs.run_dir import OOM_KILLS, oom_mark_path, oom_marks
from distexp.system.cgroups import oom_kills


def save_counters(directory: Path) -> None:
    """Save the kernel's OOM counters at the start of a run, on the node that writes the record."""
    write_json(directory / OOM_KILLS, oom_kills())


def mark_if_killed(directory: Path, node: int, before: Mapping[str, int]) -> None:
    """Leave a mark for the node that writes the record, if the OOM counter of this node has increased.

    Args:
        directory: Directory of the run.
        node: This node.
        before: Its counters at the start of the run.
    """
    if _increased(before, oom_kills()):
        with suppress(OSError):  # The run has failed anyway, and has a signal as its cause then.
            oom_mark_path(directory, node).touch()


def oom_killed(directory: Path) -> bool:
    """Return whether the kernel has killed a process of a run for memory, on this node or on one that left a mark."""
    if oom_marks(directory):
        return True
    path = directory / OOM_KILLS
    return path.exists() and _increased(json.loads(path.read_text()), oom_kills())


def _increased(before: Mapping[str, int], now: Mapping[str, int]) -> bool:
    """Return whether the OOM counter of this cgroup has increased.

    Without a cgroup, the machine's counter decides. It also counts the processes of other runs.
    """
    name = "cgroup" if "cgroup" in before and "cgroup" in now else "machine"
    return now.get(name, 0) > before.get(name, now.get(name, 0))
