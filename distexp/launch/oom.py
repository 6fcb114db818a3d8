"""Whether the kernel killed something for memory while a run went on."""

from __future__ import annotations

from pathlib import Path

from distexp.runs.record import write_json
from distexp.system.cgroups import oom_kills

FILE = "oom_kills.json"


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
