"""The presets of the workshop with ``kernels=reference`` and with ``kernels=fast``, a few steps of each.

Usage: ``python benchmarks/presets.py dataset.train_path=T.json dataset.eval_path=E.json dataset.root=FOLDER``.
See ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.arguments import gpu_error, positive
from benchmarks.measurement import REPOSITORY, end, visible_devices
from benchmarks.tables import MISSING, markdown
from distexp.runs.record import DONE

KERNELS = ("reference", "fast")
RESULTS = {*DONE, "invalid"}
"""Statuses of runs that a second command does not run again."""

DDP_BATCH = 512
"""Images per worker and step in the presets of DDP."""


@dataclass(frozen=True)
class Preset:
    """One row: a preset, and the cell of its sweep that runs here.

    Attributes:
        name: the preset.
        workers: GPUs that it needs, all of them on this machine.
        cell: overrides that choose one cell.
    """

    name: str
    workers: int = 1
    cell: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        """Return the name of the folder of its runs."""
        return self.name.replace("/", "_")

    @property
    def reads_images(self) -> bool:
        """Return whether it trains on images."""
        return self.name.startswith("ddp/")


PRESETS = (
    Preset("ddp/baseline"),
    Preset("deepspeed/baseline"),
    Preset("fsdp/baseline"),
    Preset("fsdp/custom_single"),
    Preset("deepspeed/zero_stages", cell=("zero_stage=2", "offload=false")),
    Preset("deepspeed/pin_memory", cell=("offload=pinned",)),
    Preset("deepspeed/zero_offload_single_gpu", cell=("zero_stage=2",)),
    Preset("deepspeed/model_sizes", cell=("model=bloom_1b1", "zero_stage=2")),
    Preset("ddp/multi_gpu", 2),
    Preset("deepspeed/two_gpu_stages", 2, ("zero_stage=2", "offload=false")),
    Preset("deepspeed/multi_gpu_weak_scaling", 2),
    Preset("fsdp/multi_gpu", 2),
    Preset("fsdp/custom_multi_gpu", 2),
    Preset("fsdp/custom_weak_scaling", 2, ("sweep.cells=[]",)),
    Preset("fsdp/sharding", 2, ("cluster.nodes=1", "sharding=full_shard", "offload=false")),
)
"""The presets for one machine. Those for several nodes are the same trainings on other machines."""


@dataclass(frozen=True)
class Row:
    """One run: what the table shows of it."""

    preset: str
    kernels: str
    status: str
    samples_per_second: float | None = None
    step_ms: float | None = None
    peak_mib: float | None = None
    loss: float | None = None


class Benchmark:
    """The commands of the presets, on as many GPUs at a time as there are."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.folder = options, Path(options.results).resolve()
        self.started = time.monotonic()
        self.stopped = threading.Event()
        self.processes: set[subprocess.Popen[bytes]] = set()

    def run(self, presets: Sequence[Preset]) -> None:
        """Run all presets: first those for one GPU, side by side, then those for more."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            for workers in sorted({preset.workers for preset in presets}):
                self._run_side_by_side(workers, [preset for preset in presets if preset.workers == workers])
        finally:
            self.stopped.set()
            for process in list(self.processes):
                end(process)

    def _run_side_by_side(self, workers: int, presets: Iterable[Preset]) -> None:
        waiting: queue.SimpleQueue[Preset] = queue.SimpleQueue()
        for preset in presets:
            waiting.put(preset)
        devices = visible_devices(self.options.gpus)
        shares = [devices[first : first + workers] for first in range(0, len(devices) - workers + 1, workers)]
        threads = [threading.Thread(target=self._work, args=(waiting, share), daemon=True) for share in shares]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _work(self, waiting: queue.SimpleQueue[Preset], devices: Sequence[str]) -> None:
        while not self.stopped.is_set() and time.monotonic() - self.started <= self.options.budget_s:
            try:
                preset = waiting.get_nowait()
            except queue.Empty:
                return
            if not is_done(self.folder / preset.folder):
                self._run_one(preset, devices)

    def _run_one(self, preset: Preset, devices: Sequence[str]) -> None:
        sweep, started = self.folder / preset.folder, time.monotonic()
        if sweep.exists():
            command = [sys.executable, "-m", "distexp.resume", str(sweep)]
        else:
            command = [sys.executable, "-m", "distexp", *overrides(preset, self.options), f"hydra.sweep.dir={sweep}"]
        path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ",".join(devices)}
        with (self.folder / f"{preset.folder}.log").open("a") as log:
            process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
            self.processes.add(process)
            code = process.wait()
        self.processes.discard(process)
        result = "done" if code == 0 else f"exit code {code}, see {log.name}"
        print(f"{preset.name}: {result}, {time.monotonic() - started:.0f} s", flush=True)


def main(arguments: list[str] | None = None) -> list[Row]:
    """Run the presets, print a table, and write it to ``table.md``. The same command continues an interrupted one."""
    options = parse(arguments)
    presets = [preset for preset in PRESETS if preset.name in options.presets]
    chosen = [preset for preset in presets if preset.workers <= options.gpus]
    for preset in presets:
        if preset not in chosen:
            print(f"{preset.name}: not run, needs --gpus {preset.workers}")
    Benchmark(options).run(chosen)
    rows = [row for preset in chosen for row in rows_of(preset, Path(options.results) / preset.folder)]
    text = f"    {shlex.join(['python', 'benchmarks/presets.py', *(arguments or sys.argv[1:])])}\n\n{table(rows)}"
    (Path(options.results) / "table.md").write_text(text)
    print(f"\n{text}")
    return rows


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse and check the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("overrides", nargs="*", metavar="KEY=VALUE", help="overrides of all presets, such as the paths of the data")
    add("--presets", default=",".join(preset.name for preset in PRESETS), help="some of them; default: all")
    add("--gpus", type=positive, default=2, help="GPUs to use; presets for one GPU run side by side")
    add("--steps", type=positive, default=10, help="measured steps")
    add("--warmup", type=int, default=4, help="first steps, which are not measured")
    add("--budget-s", type=float, default=math.inf, help="time after which no further preset starts")
    add("--results", default=f"benchmark_results/{datetime.now(UTC):%Y-%m-%d_%H-%M-%S}", help="folder of the runs")
    options = parser.parse_intermixed_args(arguments)
    options.presets = options.presets.split(",")
    known = [preset.name for preset in PRESETS]
    for name in options.presets:
        if name not in known:
            parser.error(f"--presets: {name} is unknown: use {', '.join(known)}")
    if error := gpu_error(options.gpus):
        parser.error(error)
    for override in options.overrides:
        if "=" not in override:
            parser.error(f"{override}: not KEY=VALUE")
    return options


def overrides(preset: Preset, options: argparse.Namespace) -> list[str]:
    """Return the overrides of a preset: one cell with each kernels, few steps, and a small evaluation."""
    steps = options.warmup + options.steps
    only_images = [f"dataset.train_size={steps * DDP_BATCH * preset.workers}"] if preset.reads_images else []
    return [
        f"experiment={preset.name}",
        *preset.cell,
        f"cluster.workers_per_node={preset.workers}",
        f"kernels={','.join(KERNELS)}",
        f"train.max_steps={steps}",
        f"train.measure_after_step={options.warmup}",
        "train.profile_steps=0",
        f"dataset.eval_size={preset.workers}",
        "train.eval_batch_size=1",
        *only_images,
        *(override for override in options.overrides if accepts(preset, override)),
    ]


def accepts(preset: Preset, override: str) -> bool:
    """Return whether a preset has the key of an override: it refuses the paths of other data."""
    key = override.lstrip("+").partition("=")[0]
    return preset.reads_images if key == "dataset.root" else not (preset.reads_images and key in TEXT_KEYS)


TEXT_KEYS = ("dataset.train_path", "dataset.eval_path", "dataset.path", "dataset.max_length", "model.tokenizer")
"""Keys that a preset for images refuses."""


def is_done(sweep: Path) -> bool:
    """Return whether both runs of a preset have a result."""
    return sum(record["status"] in RESULTS for record in read_records(sweep)) == len(KERNELS)


def read_records(sweep: Path) -> list[dict[str, Any]]:
    """Return the records of the runs of a preset."""
    return [json.loads(path.read_text()) for path in sorted(sweep.glob("*/record.json"))]


def rows_of(preset: Preset, sweep: Path) -> list[Row]:
    """Return the rows of a preset: one for each kernels."""
    name = " ".join([preset.name, *(override for override in preset.cell if override != "sweep.cells=[]")])
    by_kernels = {record["config"]["kernels"]["name"]: record for record in read_records(sweep)}
    return [row_of(name, kernels, by_kernels.get(kernels)) for kernels in KERNELS]


def row_of(name: str, kernels: str, record: dict[str, Any] | None) -> Row:
    """Return the row of a run, from its record."""
    if record is None:
        return Row(name, kernels, "not run")
    metrics, memory = record["metrics"] or {}, record["memory"] or {}
    return Row(
        preset=name,
        kernels=kernels,
        status=record["status"],
        samples_per_second=metrics.get("train_samples_per_second"),
        step_ms=1000 * median if (median := (metrics.get("step_time_s") or {}).get("p50")) else None,
        peak_mib=max((rank["peak_allocated_mib"] or 0 for rank in memory.get("torch") or ()), default=None),
        loss=metrics.get("train_loss"),
    )


def table(rows: Sequence[Row]) -> str:
    """Return a table: each row relative to that of ``kernels=reference`` of the same preset, by the median step."""
    reference = {row.preset: row for row in rows if row.kernels == "reference"}
    speeds = ["samples/s", "step ms", "times as fast"]
    header = ["preset", "kernels", *speeds, "peak MiB", "memory ratio", "loss", "status"]
    cells = []
    for row in rows:
        base = reference[row.preset]
        cells.append(
            [
                row.preset,
                row.kernels,
                _number(row.samples_per_second, "{:,.1f}"),
                _number(row.step_ms, "{:,.1f}"),
                _number(_divide(base.step_ms, row.step_ms), "{:.2f}"),
                _number(row.peak_mib, "{:,.0f}"),
                _number(_divide(row.peak_mib, base.peak_mib), "{:.2f}"),
                _number(row.loss, "{:.4f}"),
                row.status,
            ]
        )
    return markdown(header, cells, text=(0, 1, 8))


def _number(value: float | None, form: str) -> str:
    return MISSING if value is None else form.format(value)


def _divide(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator and denominator else None


if __name__ == "__main__":
    # SIGTERM must end the processes of the presets too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    main()
