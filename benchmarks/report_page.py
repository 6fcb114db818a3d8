"""Size and speed of the page of profiled runs: ``python benchmarks/report_page.py SWEEP --runs 8 1000``.

It copies the runs of a sweep, each with another learning rate and so with its own row, until there are enough. Then it
makes a report, and opens its page in chromium.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from playwright.sync_api import Page, sync_playwright

from benchmarks.measurement import REPOSITORY
from benchmarks.tables import markdown

ROW = "#runs-table tbody tr"
TIMEOUT_MS = 120_000


def copy_runs(runs: Sequence[Path], target: Path, count: int) -> None:
    """Write copies of runs. Each has its own number and learning rate. Logs are left out."""
    for number in range(count):
        source = runs[number % len(runs)]
        directory = target / str(number)
        shutil.copytree(source, directory, ignore=shutil.ignore_patterns("logs", "report", ".hydra"))
        record = json.loads((source / "record.json").read_text())
        record["run"].update(id=f"{number:012x}", number=number)
        record["config"]["train"]["learning_rate"] *= 1 + number / count
        (directory / "record.json").write_text(json.dumps(record))


def seconds(action: Callable[[], object]) -> float:
    """Return how long an action takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def make_report(sweep: Path) -> None:
    """Run ``distexp report``."""
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "distexp", "report", str(sweep)]
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)


def search(page: Page) -> None:
    """Search all columns for a text that no run has, and wait until the rows are gone."""
    page.get_by_placeholder("Search all columns").fill("in no run")
    page.wait_for_function(f"document.querySelectorAll('{ROW}').length <= 1", timeout=TIMEOUT_MS)


def measure(runs: Sequence[Path], count: int, page: Page) -> list[str]:
    """Return a row of the table."""
    with tempfile.TemporaryDirectory() as name:
        sweep = Path(name) / "sweep"
        copy_runs(runs, sweep, count)
        report_s = seconds(lambda: make_report(sweep))
        path = sweep / "report" / "report.html"

        def open_page() -> None:
            page.goto(path.as_uri(), timeout=TIMEOUT_MS)
            page.wait_for_selector(ROW, timeout=TIMEOUT_MS)

        open_s = seconds(open_page)
        search_s = seconds(lambda: search(page))
        size = path.stat().st_size / 1e6
    return [f"{count:,}", f"{size:.2f}", f"{report_s:.1f}", f"{open_s:.1f}", f"{search_s:.1f}"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, help="directory of a sweep with profile=true")
    parser.add_argument("--runs", type=int, nargs="+", default=[8, 1000], help="numbers of runs; default: 8 1000")
    options = parser.parse_args()
    runs = sorted(path.parent for path in options.sweep.glob("**/record.json"))
    if not runs:
        parser.error(f"{options.sweep} has no record.json: give the directory of a sweep")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        rows = [measure(runs, count, browser.new_page()) for count in options.runs]
        browser.close()
    print(markdown(["runs", "page (MB)", "report (s)", "open (s)", "search (s)"], rows, text=()))


if __name__ == "__main__":
    main()
