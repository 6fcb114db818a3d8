"""Whether the kernel killed something for memory while a run went on."""

from __future__ import annotations

import re
from pathlib import Path

from distexp.runs.record import write_json

FILE = "oom_kills.json"


def oom_kills() -> dict[str, int]:
    """The kernel's counters: of this process' own memory cgroup where it has one, and of the machine."""
    counters = {"machine": _count(Path("/proc/vmstat"), r"^oom_kill (\d+)$")}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            counters["cgroup"] = _count(Path(f"/sys/fs/cgroup{group}/memory.events"), r"^oom_kill (\d+)$")
        elif "memory" in controllers.split(","):
            path = Path(f"/sys/fs/cgroup/memory{group}/memory.oom_control")
            counters["cgroup"] = _count(path, r"^oom_kill (\d+)$")
    return {name: count for name, count in counters.items() if count is not None}


def _count(path: Path, pattern: str) -> int | None:
    try:
        found = re.search(pattern, path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found.group(1)) if found else None


def save_counters(directory: Path) -> None:
    """Keeps the counters as they are when a run starts."""
    write_json(directory / FILE, oom_kills())


def oom_killed(directory: Path) -> bool:
    """Whether a counter has grown since ``save_counters``."""
    import json

    path = directory / FILE
    if not path.exists():
        return False
    before = json.loads(path.read_text())
    return any(count > before.get(name, count) for name, count in oom_kills().items())
