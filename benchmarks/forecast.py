"""Errors of ``distexp forecast``: a profiled run on one GPU, its forecast for several, and a run on them.

    python benchmarks/forecast.py --gpus 2 dataset.train_path=T.json dataset.eval_path=E.json
    python benchmarks/forecast.py --gpus 2 --only zero_stage=3 --json forecast.json ...
    python benchmarks/forecast.py table forecast.json

The rows are added to the JSON file, so several commands with other ``--only`` extend it. ``table`` prints it.

``--gpus 4`` forecasts the step times on four GPUs, and runs on four. Each number of GPUs needs its own ``--json`` and
``--results``. Each configuration runs on one GPU and then on several, so ``--budget-s 500`` leaves rows of those that
are complete.

Runs with kernels=fast compile, except with ZeRO-3. Each first runs for a few steps on one GPU, so that the profiled run
finds the compiled code in the cache: a process that compiles is slower for some time afterwards.
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.commands import PACKAGES, Commands, Record, Run, select, sweep_name
from benchmarks.measurement import REPOSITORY
from benchmarks.tables import markdown
from distexp.system.cgroups import cpu_count
from distexp.system.files import read_json, write_json

TEXT = ("model=bloom_560m", "model.init=random", "dataset=squad", "dataset.padding=max_length", "precision=bf16")
WARM = ("train.max_steps=4", "train.measure_after_step=2", "train.gradient_accumulation_steps=1", "profile=false")
"""A run that compiles before the profiled one."""
SHORT = ("train.max_steps=32", "train.measure_after_step=8", "train.gradient_accumulation_steps=1")
STRATEGIES = ("strategy=ddp", "sharding=full_shard", "zero_stage=2", "zero_stage=3")
MICRO_BATCHES = (4, 16, 32)
KERNELS = ("reference", "fast")
PROFILED = "train.profile_steps=3"
ONE, SEVERAL = " on one", " on several"
"""Ends of the names of runs on one GPU and on several."""
MEDIAN_BOUND, WORST_BOUND, INSIDE_BOUND = 0.05, 0.15, 0.9
"""Bounds: of the median and the worst error, and of the share of runs inside of the interval."""


@dataclass(frozen=True)
class Row:
    """Step times of one configuration, in ms.

    Attributes:
        name: Name of the configuration.
        one: Median on one GPU, without profiled steps.
        measured: Median on several GPUs.
        forecast: Forecast for them.
        low: Lower end of its interval.
        high: Upper end of its interval.
        facts: The commit, whether its code was clean, and the versions.
    """

    name: str
    one: float
    measured: float
    forecast: float
    low: float
    high: float
    facts: Record = field(default_factory=dict)

    @property
    def error(self) -> float:
        """Return forecast / measured - 1."""
        return self.forecast / self.measured - 1

    @property
    def inside(self) -> bool:
        """Return whether the measured time is in the interval."""
        return self.low <= self.measured <= self.high


def runs(workers: int, gpus: int = 2) -> Iterator[Run]:
    """Yield all configurations on a number of workers; those on one are profiled.

    Args:
        workers: number of workers.
        gpus: GPUs of the largest runs, which share the cores of the CPU.
    """
    for strategy, kernels, size in itertools.product(STRATEGIES, KERNELS, MICRO_BATCHES):
        steps = (*SHORT, PROFILED if workers == 1 else "profile=false")
        yield _run(strategy, kernels, size, steps, workers=workers, gpus=gpus)


def warm_runs(gpus: int = 2) -> Iterator[Run]:
    """Yield the configurations that compile, with a few steps on one worker. ZeRO-3 does not compile."""
    for strategy, size in itertools.product(STRATEGIES[:-1], MICRO_BATCHES):
        yield _run(strategy, "fast", size, WARM, workers=1, gpus=gpus)


def _run(strategy: str, kernels: str, size: int, steps: Sequence[str], *, workers: int, gpus: int) -> Run:
    # Equal threads, because runs with other variables of OpenMP would not share the start-up.
    threads = f"cluster.cpus_per_worker={max(1, cpu_count() // gpus)}"
    place = (f"cluster.workers_per_node={workers}", threads, f"kernels={kernels}", f"train.micro_batch_size={size}")
    name = strategy if "zero" in strategy else strategy.partition("=")[2]
    return Run(f"{name} {kernels} {size}", (*TEXT, *steps, strategy, *place), workers)


def main(arguments: list[str] | None = None) -> list[Row]:
    """Run, forecast and compare, or print the table of a file. The same command continues."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["table"]:
        if len(given) != 2:
            sys.exit(f"table has {len(given) - 1} arguments: give one file, as table forecast.json")
        rows = read_rows(Path(given[1]))
        print(table(rows, len(list(runs(1)))))
        return rows
    return measure(parse(given))


def measure(options: argparse.Namespace) -> list[Row]:
    """Run what is chosen, add its rows to the JSON file, and print the table of the file."""
    names = [run.name for run in select(list(runs(1)), options.only)]
    if not names:
        sys.exit(f"--only {options.only!r} is in no name: use a part of {', '.join(run.name for run in runs(1))}")
    if options.gpus < 2:
        sys.exit(f"--gpus {options.gpus} is too few: use at least 2, because the forecast is for several GPUs")
    commands = Commands(options)
    path = Path(options.json) if options.json else commands.folder / "forecast.json"
    if path.exists():
        read_rows(path)  # An unreadable file must end the command before the runs, and not after them.
    commands.run_all("preflight", [preflight_run(options.gpus)])
    records = commands.run_all(sweep_name("turns", options.only), in_turns(names, options.gpus))
    links = commands.folder / f"preflight_{options.gpus}" / "0"
    rows = add_rows(path, compare(names, records, links, options.gpus))
    print(f"\n{table(rows, len(list(runs(1))))}\n{len(rows)} rows in {path}")
    return rows


def in_turns(names: Sequence[str], gpus: int = 2) -> list[Run]:
    """Return the runs of some configurations: each on one GPU and then on several, before the next configuration.

    So each configuration that is complete when the time is over has a row. All are in the sweep of several GPUs.
    """
    found_runs = (warm_runs(gpus), runs(1, gpus), runs(gpus, gpus))
    warm, one, several = ({run.name: run for run in found} for found in found_runs)
    kinds = {" warm": warm, ONE: one, SEVERAL: several}
    return [
        Run(f"{name}{kind}", found[name].overrides, gpus)
        for name in names
        for kind, found in kinds.items()
        if name in found
    ]


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file; exit if it cannot be read."""
    try:
        return [Row(**row) for row in read_json(path)]
    except (OSError, ValueError, TypeError) as error:
        sys.exit(f"{path} has no rows of forecasts ({error}): write one with --json {path}")


def add_rows(path: Path, rows: Iterable[Row]) -> list[Row]:
    """Add rows to a file, which may not exist. A new row replaces that of the same configuration."""
    known = {row.name: row for row in (read_rows(path) if path.exists() else [])}
    known |= {row.name: row for row in rows}
    order = [run.name for run in runs(1)]
    found = sorted(known.values(), key=lambda row: order.index(row.name) if row.name in order else len(order))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, [asdict(row) for row in found])
    return found


def preflight_run(gpus: int = 2) -> Run:
    """Return the measurement of the links between GPUs."""
    place = f"cluster.workers_per_node={gpus}"
    return Run("preflight", ("preflight.enabled=true", "command=preflight", place), gpus)


def compare(names: Sequence[str], records: Mapping[str, Record], preflight: Path, gpus: int = 2) -> Iterator[Row]:
    """Yield the configurations that were run on one GPU and on several."""
    for name in names:
        pair = [records.get(f"{name}{kind}") for kind in (ONE, SEVERAL)]
        found = [record for record in pair if record is not None and record["status"] == "completed"]
        if len(found) < len(pair):
            continue
        forecast = forecast_of(Path(found[0]["directory"]), preflight, gpus)
        if forecast is not None:
            measured = [record["metrics"]["step_time_s"]["p50"] for record in found]
            expected = [forecast[key] for key in ("step_time_s", "low_s", "high_s")]
            times = (round(1000 * seconds, 3) for seconds in (*measured, *expected))
            yield Row(name, *times, facts=facts_of(found[-1]))


def facts_of(record: Record) -> Record:
    """Return where a run was measured, and with which code."""
    names = ("gpu_name", "torch", "python", "transformers", "deepspeed")
    code = {"commit": record["run"]["git_sha"], "clean": record["run"]["git_dirty"] is False}
    return code | {name: (record["environment"] or {}).get(name) for name in names}


def forecast_of(directory: Path, preflight: Path, gpus: int = 2) -> dict[str, Any] | None:
    """Return the forecast of a run for several GPUs; print why there is none."""
    words = [str(directory), f"cluster.workers_per_node={gpus}", "forecast.memory=off", PACKAGES, "--json"]
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
            f"{row.one:.1f}",
            f"{row.measured:.1f}",
            f"{row.forecast:.1f}",
            f"{row.error:+.1%}",
            f"{row.low:.1f} to {row.high:.1f}",
            "yes" if row.inside else "NO",
        ]
        for row in rows
    ]
    header = ["run", "one GPU ms", "several GPUs ms", "forecast ms", "error", "interval", "inside"]
    text = markdown(header, cells, text=(0, 5, 6))
    if not rows:
        return f"{text}\n0 of {planned} configurations were run\n"
    errors = [abs(row.error) for row in rows]
    inside = sum(row.inside for row in rows) / len(rows)
    return (
        f"{text}\n{len(rows)} of {planned} configurations. Median error {statistics.median(errors):.1%} (bound "
        f"{MEDIAN_BOUND:.0%}), worst {max(errors):.1%} ({WORST_BOUND:.0%}), inside {inside:.0%} ({INSIDE_BOUND:.0%}).\n"
    )


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("overrides", nargs="*", metavar="KEY=VALUE", help="overrides of all runs, such as the paths of the data")
    add("--only", default="", help="texts in the names of the runs, such as 'ddp,full_shard fast'; default: all")
    add("--gpus", type=int, default=2, help="GPUs of the forecast, by default 2")
    add("--budget-s", type=float, default=math.inf, help="time after which the runs stop")
    add("--json", default="", help="file to which the rows are added; default: forecast.json in the folder of the runs")
    add("--results", default="benchmark_results/forecast", help="folder of the runs")
    return parser.parse_intermixed_args(arguments)


if __name__ == "__main__":
    # SIGTERM must end the processes of a sweep too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    main()
