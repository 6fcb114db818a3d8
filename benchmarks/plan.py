"""Memory as predicted by ``distexp plan``, and as measured on GPUs.

Usage: ``python benchmarks/plan.py predict``, and on a machine with GPUs ``python benchmarks/plan.py run``.
See ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from queue import Queue
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.measurement import visible_devices
from distexp.config.overrides import key_of
from distexp.plan.estimate import Estimate
from distexp.plan.verdict import DOES_NOT_FIT, FITS, TOO_CLOSE, verdict_of
from distexp.system.files import remove

ROOT = Path(__file__).parents[1]
CELLS = Path(__file__).with_name("plan_cells.yaml")
MODELS = Path(__file__).with_name("models.yaml")
PREDICTED = ROOT / "docs" / "results" / "plan_predicted.json"
PLANNED_GPU = "plan.gpu=h200-141gb"
WORKERS = "cluster.workers_per_node="
FIGURES = ("peak_allocated_mib", "peak_reserved_mib", "nvidia_smi_mib", "host_peak_mib", "required_mib", "phase")
VERDICTS = {FITS: "fits", TOO_CLOSE: "not certain", DOES_NOT_FIT: "does not fit"}


@dataclass(frozen=True)
class Cell:
    """A run: its arguments, and the memory of its GPU as shares of the predicted need."""

    text: str
    limits: tuple[float, ...]
    arguments: tuple[str, ...]

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of the run."""
        return next(
            (int(argument.removeprefix(WORKERS)) for argument in self.arguments if argument.startswith(WORKERS)), 1
        )


def main(arguments: list[str] | None = None) -> None:
    """Predict, or run and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("predict", "run", "compare"))
    parser.add_argument("--cells", type=Path, default=CELLS, help="file of the cells")
    parser.add_argument("--predicted", type=Path, default=PREDICTED, help="file of the predictions")
    parser.add_argument("--results", type=Path, default=Path("benchmark_results/plan"), help="folder of the runs")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs of this machine")
    parser.add_argument("--only", default="", help="only cells that contain this text")
    parser.add_argument("--limits-only", action="store_true", help="only runs with a limited GPU memory")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="seconds after which no run starts")
    parser.add_argument("--timeout-s", type=float, default=180, help="time limit of a run in seconds")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        cells = [cell for cell in read_cells(options.cells, Path(folder)) if options.only in cell.text]
        if options.action == "predict":
            predict_cells(cells, options.predicted)
            return
        predicted = json.loads(options.predicted.read_text())["cells"]
        if options.action == "run":
            run_cells([cell for cell in cells if cell.text in predicted], predicted, options)
    compare(predicted, options.results)


def read_cells(path: Path, folder: Path) -> list[Cell]:
    """Return all cells. The models of the file are written into a folder, and replace their names in capitals."""
    content = yaml.safe_load(path.read_text())
    models = {name: str(write_model(folder, name)) for name in content["models"]}
    cells = []
    entries = [entry if isinstance(entry, dict) else {"cell": entry, "limits": []} for entry in content["cells"]]
    for entry in entries:
        data, *own = shlex.split(entry["cell"])
        own = [re.sub(r"(?<=model.name=)[A-Z]\w*", lambda found: models[found[0]], override) for override in own]
        arguments = (*shlex.split(content["common"]), *shlex.split(content[data]), *own)
        cells.append(
            Cell(entry["cell"], tuple(entry["limits"]), tuple({key_of(text): text for text in arguments}.values()))
        )
    return cells


def write_model(folder: Path, name: str) -> Path:
    """Write the configuration of a model of ``models.yaml`` into a folder of its name, and return that folder."""
    target = folder / name.lower()
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(yaml.safe_load(MODELS.read_text())[name]))
    return target


def predict_cells(cells: list[Cell], path: Path) -> None:
    """Predict all cells and write them. Cells that the file has are kept."""
    known = json.loads(path.read_text())["cells"] if path.exists() else {}
    libraries = {name: version(name) for name in ("torch", "transformers", "deepspeed")}
    for cell in cells:
        if cell.text in known:
            continue
        command = ["-m", "distexp", "plan", "--json", PLANNED_GPU, *cell.arguments]
        done = subprocess.run([sys.executable, *command], check=False, cwd=ROOT, capture_output=True, text=True)
        found = json.loads(done.stdout)[0] if done.stdout else {"error": done.stderr[-2000:]}
        if found.get("error"):
            print(f"{cell.text}: {found['error']}", flush=True)
            continue
        known[cell.text] = {**{name: found[name] for name in FIGURES}, "limits_mib": _limits(cell, found)}
        print(f"{cell.text}: {found['peak_allocated_mib']:,.0f} MiB in {found['seconds']:.0f} s", flush=True)
        path.write_text(json.dumps({"versions": libraries, "cells": known}, indent=1) + "\n")


def _limits(cell: Cell, found: dict[str, Any]) -> list[int]:
    """Return the memories that a run is tried with. With a share below 1, the GPU has less than the run needs."""
    return [round(found["required_mib"] * share) for share in cell.limits]


def run_cells(cells: list[Cell], predicted: dict[str, Any], options: argparse.Namespace) -> None:
    """Run the cells that have no result: those of one GPU on all GPUs at the same time, then the others."""
    free_memory: list[int | None] = [] if options.limits_only else [None]
    jobs = [
        (cell, limit) for cell in cells for limit in [*free_memory, *predicted[cell.text]["limits_mib"]]
        if not result_path(options.results, cell.text, limit).exists() and cell.gpus <= options.gpus
    ]  # fmt: skip
    end = time.monotonic() + options.budget_s
    names = visible_devices(options.gpus)
    free: Queue[str] = Queue()
    for name in names:
        free.put(name)

    def run_on_free_gpu(job: tuple[Cell, int | None]) -> None:
        gpu = free.get()
        try:
            run(*job, gpu, end, options)
        finally:
            free.put(gpu)

    with ThreadPoolExecutor(options.gpus) as pool:
        list(pool.map(run_on_free_gpu, [job for job in jobs if job[0].gpus == 1]))
    for cell, limit in [job for job in jobs if job[0].gpus > 1]:
        run(cell, limit, ",".join(names[: cell.gpus]), end, options)


def run(cell: Cell, limit_mib: int | None, gpus: str, end: float, options: argparse.Namespace) -> None:
    """Run a cell and keep its record. A run that was stopped by its time limit starts again the next time."""
    if time.monotonic() > end:
        return
    target = result_path(options.results, cell.text, limit_mib)
    folder = target.with_suffix("")
    command = [sys.executable, "-m", "distexp", *cell.arguments, f"hydra.run.dir={folder}"]
    if limit_mib is not None:
        command.append(f"cluster.gpu_memory_limit_gb={limit_mib / 1024:.4f}")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpus}
    remove(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".log").open("w") as log:
        try:
            subprocess.run(
                command, check=False, cwd=ROOT, env=environment, stdout=log, stderr=log, timeout=options.timeout_s
            )
        except subprocess.TimeoutExpired:
            print(f"{cell.text}: stopped after {options.timeout_s:.0f} s", flush=True)
            return
    records = sorted(folder.rglob("record.json"))
    if not records:
        print(f"{cell.text}: no record, see {folder.with_suffix('.log')}", flush=True)
        return
    record = json.loads(records[0].read_text())
    memory = record.get("memory") or {}
    content = {
        "cell": cell.text,
        "limit_mib": limit_mib,
        "status": record["status"],
        "peak_allocated_mib": _largest(memory, "torch", "peak_allocated_mib"),
        "peak_reserved_mib": _largest(memory, "torch", "peak_reserved_mib"),
        "nvidia_smi_mib": _largest(memory, "gpu", "peak_mib"),
        "host_peak_mib": _largest(memory, "cpu", "peak_mib"),
        "gpu": (record.get("environment") or {}).get("gpu_name"),
        "torch": (record.get("environment") or {}).get("torch"),
    }
    target.write_text(json.dumps(content, indent=1) + "\n")
    print(f"{cell.text} {'' if limit_mib is None else f'limit {limit_mib} MiB '}{content['status']}", flush=True)


def _largest(memory: dict[str, Any], kind: str, name: str) -> float | None:
    return max((entry[name] for entry in memory.get(kind) or [] if entry.get(name) is not None), default=None)


def result_path(folder: Path, text: str, limit_mib: int | None) -> Path:
    """Return the file of a result."""
    name = "_".join(text.replace("/", "-").replace("=", "-").split())
    return folder.resolve() / f"{name}{'' if limit_mib is None else f'_{limit_mib}'}.json"


def compare(predicted: dict[str, Any], folder: Path) -> None:
    """Print and write the tables: errors of the peaks, and verdicts near the edge."""
    lines = [*error_table(predicted, folder), "", *verdict_table(predicted, folder)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def error_table(predicted: dict[str, Any], folder: Path) -> Iterator[str]:
    """Yield a row per run without a limit, and the errors over all of them."""
    yield "| run | measured | predicted | error | reserved | nvidia-smi | host |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    errors: dict[str, list[float]] = {name: [] for name in FIGURES[:4]}
    for text, expected in predicted.items():
        path = result_path(folder, text, None)
        found = json.loads(path.read_text()) if path.exists() else None
        if found is None or found["peak_allocated_mib"] is None:
            yield f"| {text} | {'not run' if found is None else found['status']} | | | | | |"
            continue
        cells = []
        for name, values in errors.items():
            if found[name] and expected[name]:
                values.append(expected[name] / found[name] - 1)
                cells.append(f"{values[-1]:+.1%}")
            else:
                cells.append("")
        peaks = f"{found['peak_allocated_mib']:,.0f} | {expected['peak_allocated_mib']:,.0f}"
        yield f"| {text} | {peaks} | {' | '.join(cells)} |"
    yield ""
    for name, values in errors.items():
        absolute = [abs(value) for value in values]
        if absolute:
            median, worst = statistics.median(absolute), max(absolute)
            yield f"{name}: median error {median:.1%}, worst {worst:.1%}, {len(absolute)} runs"


def verdict_table(predicted: dict[str, Any], folder: Path) -> Iterator[str]:
    """Yield a row per run with a limit."""
    yield "| run | limit in MiB | predicted need | verdict | run |"
    yield "| --- | ---: | ---: | --- | --- |"
    for text, expected in predicted.items():
        for limit in expected["limits_mib"]:
            path = result_path(folder, text, limit)
            status = json.loads(path.read_text())["status"] if path.exists() else "not run"
            estimate = Estimate(step_mib=expected["required_mib"])
            verdict = VERDICTS[verdict_of(estimate, limit) or TOO_CLOSE]
            yield f"| {text} | {limit:,} | {expected['required_mib']:,.0f} | {verdict} | {status} |"


if __name__ == "__main__":
    main()
