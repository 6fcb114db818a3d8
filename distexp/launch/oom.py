"""Detection of processes that the kernel killed for memory during a run."""

from __future__ import annotations

import json
from pathlib import Path

from distexp.runs.json_files import write_json
from distexp.runs.run_dir import OOM_KILLS
from distexp.system.cgroups import oom_kills


def save_counters(directory: Path) -> None:
    """Save the kernel's OOM counters at the start of a run."""
    write_json(directory / OOM_KILLS, oom_kills())


def oom_killed(directory: Path) -> bool:
    """Return whether the OOM counter of this cgroup has increased since ``save_counters``.

    Without a cgroup, the machine's counter decides. It also counts the processes of other runs.
    """
    path = directory / OOM_KILLS
    if not path.exists():
        return False
    before, now = json.loads(path.read_text()), oom_kills()
    name = "cgroup" if "cgroup" in before and "cgroup" in now else "machine"
    return bool(now.get(name, 0) > before.get(name, now.get(name, 0)))
