"""Runs of distexp for a benchmark: one sweep for each number of GPUs, whose runs share a start-up if they can."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measurement import REPOSITORY, end, visible_devices
from distexp.runs.record import DONE

Record = dict[str, Any]
"""Content of ``record.json``, and the run directory under ``directory``."""

PACKAGES = "trusted_packages=[benchmarks,tests]"
"""Packages of this repository with models and strategies of the benchmarks."""


@dataclass(frozen=True)
class Run:
    """One run, with what is expected of it."""

    name: str
    overrides: tuple[str, ...]
    workers: int = 1
    expected: str = ""


def select(runs: Sequence[Run], only: str) -> list[Run]:
    """Return the runs whose names contain one of some texts, which are separated by commas; without a text, all."""
    return [run for run in runs if any(text in run.name for text in only.split(","))]


def sweep_name(name: str, only: str) -> str:
    """Return the name of the sweep of chosen runs, for a folder. Other runs need other sweeps.

    Hydra reads some characters of a path as its own, such as ``=`` and spaces.
    """
    return "_".join([name, *(re.sub(r"[^\w.-]+", "-", text.strip()) for text in only.split(",") if text.strip())])


class Commands:
    """The commands of a benchmark, until the time is over.

    Args:
        options: ``results``, ``gpus``, ``budget_s``, and ``overrides``, which are added to each run. Those that begin
            with ``dataset.`` are for runs on SQuAD only.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.folder = options, Path(options.results).resolve()
        self.deadline = time.monotonic() + options.budget_s

    def run_all(self, name: str, runs: Sequence[Run]) -> dict[str, Record]:
        """Run what has no record yet, as far as GPUs and time allow; return the records by the names of the runs."""
        found: dict[str, Record] = {}
        for workers in sorted({run.workers for run in runs}):
            chosen = [run for run in runs if run.workers == workers]
            sweep = self.folder / f"{name}_{workers}"
            if workers <= self.options.gpus and len(self._records(sweep, chosen, only=DONE)) < len(chosen):
                self._run_sweep(sweep, chosen)
            found |= self._records(sweep, chosen)
        return found

    def _run_sweep(self, sweep: Path, runs: Sequence[Run]) -> None:
        """Run a sweep, or what is missing in it, until the time is over."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            return
        if sweep.exists():
            command = [sys.executable, "-m", "distexp.resume", str(sweep), PACKAGES]
        else:
            cells = json.dumps([self._overrides(run) for run in runs])
            words = [f"sweep.cells={cells}", PACKAGES, f"hydra.sweep.dir={sweep}"]
            command = [sys.executable, "-m", "distexp", "--multirun", *words]
        path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
        devices = ",".join(visible_devices(self.options.gpus)[: runs[0].workers])
        env = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": devices}
        self.folder.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        with sweep.with_suffix(".log").open("a") as log:
            process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
            try:
                process.wait(None if math.isinf(left) else left)
            except subprocess.TimeoutExpired:
                print(f"{sweep.name}: stopped, because the time is over", flush=True)
            finally:
                end(process)
        done = len(self._records(sweep, runs))
        print(
            f"{sweep.name}: {done} of {len(runs)} runs, {time.monotonic() - started:.0f} s, see {log.name}", flush=True
        )

    def _overrides(self, run: Run) -> list[str]:
        """Return the overrides of a run, without keys that a later override sets again."""
        on_squad = "dataset=squad" in run.overrides
        given = [override for override in self.options.overrides if on_squad or not override.startswith("dataset.")]
        return list({override.partition("=")[0]: override for override in (*run.overrides, *given)}.values())

    def _records(self, sweep: Path, runs: Sequence[Run], only: Sequence[str] | None = None) -> dict[str, Record]:
        paths = sorted(sweep.glob("*/record.json"))
        records = [json.loads(path.read_text()) | {"directory": str(path.parent)} for path in paths]
        kept = [record for record in records if only is None or record["status"] in only]
        return {runs[record["run"]["number"]].name: record for record in kept}
