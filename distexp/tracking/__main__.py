"""The tracker process, ``python -m distexp.tracking RUN_DIR``: it follows a run until its record is written."""

import signal
import sys
import threading
from pathlib import Path

from distexp.config.custom_code import check_members, check_returned, locate
from distexp.exceptions import text_of
from distexp.runs.record import RunRecord, RunSpec
from distexp.runs.run_dir import EVENTS, METRICS, RECORD, TRACKER_END
from distexp.system import files, processes
from distexp.tracking.trackers import ARTIFACTS, Tracker, evaluation_values, step_values, summary_values

POLL_S = 0.5


def main() -> None:
    """Send everything that the run writes to the tracker; print messages for the user."""
    directory, over = Path(sys.argv[1]), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())  # the parent process has died
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher handles Ctrl-C
    processes.die_with_parent(signal.SIGTERM)
    spec = RunSpec.read(directory)
    name = spec.config.tracker.name
    try:
        target = spec.config.tracker._target_ or ""
        tracker = locate(target)(spec, directory)
        check_members(tracker, Tracker, f"tracker._target_={target}")
        messages = follow(tracker, directory, over)
        check_returned(messages, list, f"tracker._target_={target}: finish()")
        for message in messages:
            print(f"{name}: {message}")
    except Exception as error:
        reason = f"{type(error).__name__}: {text_of(error)}"
        print(f"warning: tracker={name} failed, and the run continued without it: {reason}")


def follow(tracker: Tracker, directory: Path, over: threading.Event) -> list[str]:
    """Log steps and evaluations until ``over`` is set or ``TRACKER_END`` exists, then the summary; return messages."""
    metrics, events = files.Tail(directory / METRICS), files.Tail(directory / EVENTS)
    step = 0
    while True:
        last = over.wait(POLL_S) or (directory / TRACKER_END).exists()
        for line in metrics.read_entries():
            step = line["step"]
            tracker.log(step, step_values(line))
        for line in events.read_entries():
            if values := evaluation_values(line):
                tracker.log(step, values)
        if last:
            record = RunRecord.read(directory / RECORD)
            artifacts = [path for pattern in ARTIFACTS for path in sorted(directory.glob(pattern))]
            return tracker.finish(record, summary_values(record), artifacts)


if __name__ == "__main__":
    main()
