"""``python -m distexp.tracking RUN_DIR``: follows a run until a file says that its record is there."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

from distexp.config.targets import locate
from distexp.console.screen import Tail
from distexp.runs.record import RECORD, RunRecord
from distexp.runs.spec import RunSpec
from distexp.system.processes import die_with_parent
from distexp.tracking.base import END, Tracker, artifacts, evaluation_values, step_values, summary

POLL_S = 0.5


def main() -> None:
    """Tells the tracker everything that the run writes; what the user should know goes to standard output."""
    directory, over = Path(sys.argv[1]), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())  # whoever started this is gone
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to answer
    die_with_parent(signal.SIGTERM)
    spec = RunSpec.read(directory)
    name = spec.config.tracker.name
    try:
        for sentence in follow(locate(spec.config.tracker._target_ or "")(spec, directory), directory, over):
            print(f"{name}: {sentence}")
    except Exception as error:
        print(f"warning: tracker={name} failed, and the run went on: {type(error).__name__}: {error}")


def follow(tracker: Tracker, directory: Path, over: threading.Event) -> list[str]:
    """Hands on steps and evaluations as they come, and summary and files at the end."""
    metrics, events = Tail(directory / "metrics.jsonl"), Tail(directory / "events.jsonl")
    step = 0
    while True:
        last = over.wait(POLL_S) or (directory / END).exists()
        for line in metrics.records():
            step = line["step"]
            tracker.log(step, step_values(line))
        for line in events.records():
            if values := evaluation_values(line):
                tracker.log(step, values)
        if last:
            record = RunRecord.read(directory / RECORD)
            return tracker.finish(record, summary(record), artifacts(directory))


if __name__ == "__main__":
    main()
