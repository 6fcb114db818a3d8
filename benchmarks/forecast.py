"""Errors of ``distexp forecast``: a profiled run on one GPU, its forecast for two, and a run on two.

Usage: ``python benchmarks/forecast.py --gpus 2 dataset.train_path=T.json dataset.eval_path=E.json``.
See ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.commands import PACKAGES, Commands, Record, Run, select, sweep_name
from benchmarks.measurement import REPOSITORY
from benchmarks.tables import markdown

TEXT = ("model=bloom_560m", "model.init=random", "dataset=squad", "dataset.padding=max_length", "precision=bf16")
SHORT = ("train.max_steps=32", "train.measure_after_step=8", "train.gradient_accumulation_steps=1")
STRATEGIES = ("strategy=ddp", "sharding=full_shard", "zero_stage=2", "zero_stage=3")
MICRO_BATCHES = (4, 16, 32)
KERNELS = ("reference", "fast")
MEDIAN_BOUND, WORST_BOUND, INSIDE_BOUND = 0.05, 0.15, 0.9
"""Bounds: of the median and the worst error, and of the share of runs inside of the interval."""


@dataclass(frozen=True)
class Row:
    """Step times of one configuration on two GPUs, in ms."""

    name: str
    measured: float
    forecast: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """Return forecast / measured - 1."""
        return self.forecast / self.measured - 1

    @property
    def inside(self) -> bool:
        """Return whether the measured time is in the interval."""
        return self.low <= self.measured <= self.high


def runs(workers: int) -> Iterator[Run]:
    """Yield all configurations on a number of workers; those on one are profiled."""
    for strategy, kernels, size in itertools.product(STRATEGIES, KERNELS, MICRO_BATCHES):
        place = (f"cluster.workers_per_node={workers}", "train.profile_steps=3" if workers == 1 else "profile=false")
        overrides = (*TEXT, *SHORT, strategy, f"kernels={kernels}", f"train.micro_batch_size={size}", *place)
        name = strategy if "zero" in strategy else strategy.partition("=")[2]
        yield Run(f"{name} {kernels} {size}", overrides, workers)


def main(arguments: list[str] | None = None) -> list[Row]:
    """Run, forecast and compare; print a table and write it to ``table.md``. The same command continues."""
    options = parse(arguments)
    commands = Commands(options)
    commands.run_all("preflight", [preflight_run()])
    one, two = (select(list(runs(workers)), options.only) for workers in (1, 2))
    name = sweep_name("runs", options.only)
    commands.run_all(name, [*one, *two])
    sweeps = [commands.folder / f"{name}_{workers}" for workers in (1, 2)]
    rows = list(compare(one, *sweeps, commands.folder / "preflight_2" / "0"))
    text = table(rows, len(one))
    (commands.folder / "table.md").write_text(text)
    print(f"\n{text}")
    return rows


def preflight_run() -> Run:
    """Return the measurement of the links between two GPUs."""
    return Run("preflight", ("preflight.enabled=true", "preflight.only=true", "cluster.workers_per_node=2"), 2)


def compare(planned: Sequence[Run], one: Path, two: Path, preflight: Path) -> Iterator[Row]:
    """Yield the configurations that were run on one GPU and on two."""
    for number, run in enumerate(planned):
        single, pair = read_record(one / str(number)), read_record(two / str(number))
        if single is None or pair is None:
            continue
        forecast = forecast_of(one / str(number), preflight)
        if forecast is not None:
            milliseconds = (1000 * forecast[name] for name in ("step_time_s", "low_s", "high_s"))
            yield Row(run.name, 1000 * pair["metrics"]["step_time_s"]["p50"], *milliseconds)


def read_record(directory: Path) -> Record | None:
    """Return the record of a completed run; None if there is none."""
    path = directory / "record.json"
    record: Record | None = json.loads(path.read_text()) if path.exists() else None
    return record if record and record["status"] == "completed" else None


def forecast_of(directory: Path, preflight: Path) -> dict[str, Any] | None:
    """Return the forecast of a run for two GPUs; print why there is none."""
    words = [str(directory), "cluster.workers_per_node=2", "forecast.memory=off", PACKAGES, "--json"]
    measured = [f"forecast.preflight={preflight}"] if preflight.exists() else []
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "distexp", "forecast", *words, *measured]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{directory}: {done.stderr.strip()}", flush=True)
        return None
    (found,) = json.loads(done.stdout)
    return dict(found)


def table(rows: Sequence[Row], planned: int) -> str:
    """Return the table of all rows, and the errors over all of them."""
    cells = [
        [
            row.name,
            f"{row.measured:.1f}",
            f"{row.forecast:.1f}",
            f"{row.error:+.1%}",
            f"{row.low:.1f} to {row.high:.1f}",
            "yes" if row.inside else "NO",
        ]
        for row in rows
    ]
    text = markdown(["run", "measured ms", "forecast ms", "error", "interval", "inside"], cells, text=(0, 4, 5))
    if not rows:
        return f"{text}\n0 of {planned} configurations were run\n"
    errors = [abs(row.error) for row in rows]
    inside = sum(row.inside for row in rows) / len(rows)
    return (
        f"{text}\n{len(rows)} of {planned} configurations. Median error {statistics.median(errors):.1%} (bound "
        f"{MEDIAN_BOUND:.0%}), worst {max(errors):.1%} ({WORST_BOUND:.0%}), inside {inside:.0%} ({INSIDE_BOUND:.0%}).\n"
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("overrides", nargs="*", metavar="KEY=VALUE", help="overrides of all runs, such as the paths of the data")
    add("--only", default="", help="texts in the names of the runs, such as 'ddp,full_shard fast'; default: all")
    add("--gpus", type=int, default=2, help="GPUs to use")
    add("--budget-s", type=float, default=math.inf, help="time after which the runs stop")
    add("--results", default="benchmark_results/forecast", help="folder of the runs")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    # SIGTERM must end the processes of a sweep too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    main()
