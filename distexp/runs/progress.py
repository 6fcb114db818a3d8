"""How far a run is, by the files that it writes: read from their ends, for they grow long."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distexp.runs.heartbeat import last_heartbeat
from distexp.runs.phases import read_phase_events

END_BYTES = 4096


@dataclass(frozen=True)
class Progress:
    """The latest that a run has told; None where it has not."""

    phase: str | None = None
    step: int | None = None
    steps: int | None = None
    loss: float | None = None

    def __str__(self) -> str:
        if self.step is None:
            return self.phase or "start"
        loss = "nan" if self.loss is None else f"{self.loss:.4f}"
        return f"{self.phase} step {self.step}/{self.steps or '?'}, loss {loss}"


def progress(directory: Path) -> Progress:
    """What a run's metrics and events say last."""
    marks = read_phase_events(directory / "events.jsonl")
    last = _last_line(directory / "metrics.jsonl")
    return Progress(
        phase=marks[-1].phase if marks else None,
        step=last.get("step"),
        steps=_total(directory / "events.jsonl"),
        loss=last.get("loss"),
    )


def last_activity(directory: Path) -> float:
    """Unix time in seconds at which a run last wrote down anything; 0 before any."""
    paths = (directory / "spec.json", *directory.glob("memory/*.csv"))
    return max([last_heartbeat(directory), *(path.stat().st_mtime for path in paths if path.exists())])


def _last_line(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - END_BYTES))
            whole = file.read().rpartition(b"\n")[0]
        content: dict[str, Any] = json.loads(whole.rpartition(b"\n")[2])
    except (OSError, ValueError):
        return {}
    return content


def _total(path: Path) -> int | None:
    """The steps that the run will take, which it tells once."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        if '"total_steps"' in line:
            try:
                return int(json.loads(line)["total_steps"])
            except (ValueError, KeyError):
                continue
    return None
