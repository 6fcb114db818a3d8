"""Time of a report: ``python benchmarks/report_5000_records.py [RUNS]``."""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from distexp.report.__main__ import main as report
from tests.helpers.report_sweeps import many_runs


def cpu_seconds() -> float:
    """Return the CPU time of this process in seconds."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Print the time of a report and the size of its page."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 5000
    with tempfile.TemporaryDirectory() as name:
        sweep = many_runs(Path(name), count, samples=2000)
        started, cpu_started = time.perf_counter(), cpu_seconds()
        report([str(sweep)])
        elapsed, cpu = time.perf_counter() - started, cpu_seconds() - cpu_started
        size = (sweep / "report" / "report.html").stat().st_size
    print(f"report on {count:,} runs: {elapsed:.1f} s, {cpu:.1f} s of CPU time, page of {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
