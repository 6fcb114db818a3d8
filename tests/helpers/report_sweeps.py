"""Directories of whole sweeps with traces, computed by formula."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distexp.runs.memory_trace import COLUMNS
from distexp.runs.record import RunRecord
from distexp.runs.record_sections import RunError
from tests.helpers.records import record, write

PHASES = (("setup", 0.0, 6.0), ("warmup", 6.0, 8.0), ("train", 8.0, 26.0), ("eval", 26.0, 30.0))
STEPS = 40


def write_traces(directory: Path, run: RunRecord, *, gap: float = 0.0, samples: int = 60) -> None:
    """Write what a run leaves next to its record: losses, memory and logs.

    Args:
        directory: The run directory.
        run: Its record.
        gap: Relative distance of the losses from those of other runs.
        samples: Memory samples of each node.
    """
    speed = run.metrics.train_samples_per_second or 50.0
    nodes = run.config["cluster"]["nodes"]
    lines = [
        {
            "step": step, "epoch": step / 20, "loss": (2 + 4 * math.exp(-step / 9)) * (1 + gap), "grad_norm": 1.0,
            "learning_rate": 1e-4, "step_time_s": (8 + math.sin(step) ** 2) / speed, "samples_per_second": speed,
        }
        for step in range(1, STEPS + 1)
    ]  # fmt: skip
    has_failed = run.status != "completed"
    (directory / "metrics.jsonl").write_text("" if has_failed else "".join(json.dumps(line) + "\n" for line in lines))
    (directory / "logs" / "node0").mkdir(parents=True)
    (directory / "logs" / "node0" / "rank0.log").write_text("a line\n")
    (directory / "memory").mkdir()
    peaks = [entry["peak_mib"] for entry in run.memory["gpu"]]
    for node in range(nodes):
        text = ",".join(COLUMNS) + "\n"
        for n in range(samples):
            second = 30 * n / samples
            phase = next(name for name, begin, end in PHASES if begin <= second < end)
            text += f"{1000 + second:.3f},{phase},cpu,0,{900 + 20 * second + 100 * node:.1f},64000,,,,,,,,,,,\n"
            for index, peak in enumerate(peaks):
                fraction = {"setup": 0.2, "warmup": 0.8, "train": 1.0, "eval": 0.6}[phase] * (0.93 if n % 3 else 1.0)
                text += f"{1000 + second:.3f},{phase},gpu,{index},{peak * fraction:.1f},143771,90,500,,,,,,,,,\n"
        (directory / "memory" / f"node{node}.csv").write_text(text)


def enrich(run: RunRecord, *, parameters: int = 559_214_592, cpu: float = 4000.0) -> RunRecord:
    """Add the metrics and the machine that ``record`` leaves out. Return the record."""
    speed = run.metrics.train_samples_per_second
    run.run.hosts, run.run.git_sha, run.run.git_dirty = ["gpu001"], "5e1f00d" * 5 + "abcde", False
    run.run.started_at = "2026-01-01T10:00:00+00:00"
    run.memory["cpu"] = [{"node": 0, "peak_mib": cpu, "average_mib": cpu * 0.8, "mode_mib": cpu * 0.9}]
    if run.environment:
        run.environment.torch, run.environment.cpu_count = "2.13.0", 64
    if run.built and speed:
        run.built.parameters = parameters
        metrics = run.metrics
        metrics.steps_per_epoch, metrics.total_steps, metrics.eval_losses = 20, STEPS, [2.5, 2.1]
        metrics.step_time_s = {"p50": 8.3 / speed, "p90": 9 / speed, "max": 14 / speed}
        metrics.data_wait_s = 0.1
    return run


def zero_sweep(path: Path, *, swap: tuple[int, int] | None = None) -> Path:
    """Write a sweep of ZeRO stages with and without offloading, on two models.

    Stage 1 of the large model runs out of memory. ``swap`` exchanges the metrics of two runs.
    """
    runs, number = [], 0
    for model, size in (("bloom_560m", 1.0), ("bloom_3b", 4.6)):
        for stage, memory, speed in ((1, 31000, 120.0), (2, 27000, 118.0), (3, 21000, 96.0)):
            for offload in (False, True):
                peak, rate = size * memory * (0.62 if offload else 1), speed / size * (0.55 if offload else 1)
                out = size > 1 and stage == 1 and not offload
                runs.append(
                    record(
                        number, strategy="deepspeed", deepspeed__zero_stage=stage, offload__enabled=offload,
                        model__name=model, cluster__device="cuda", precision__name="bf16",
                        peak=143000.0 if out else peak, speed=rate, status="oom_gpu" if out else "completed",
                        error=RunError("OutOfMemoryError", "CUDA out of memory", "train", 0) if out else None,
                        overrides=(f"model={model}", f"zero_stage={stage}", f"offload={offload}".lower()),
                    )
                )  # fmt: skip
                enrich(runs[-1], cpu=9000.0 if offload else 4000.0)
                number += 1
    if swap:
        one, other = (runs[n] for n in swap)
        one.metrics, other.metrics = other.metrics, one.metrics
        one.memory, other.memory = other.memory, one.memory
    return with_traces(path, runs)


def growing_sweep(path: Path, *, weak: bool = False, swap: tuple[int, int] | None = None) -> Path:
    """Write a scaling sweep: 1, 2, 4 workers on a node, then 2 x 1, 2 x 2, 4 x 2."""
    runs = []
    speeds = {(1, 1): 100.0, (1, 2): 190.0, (1, 4): 340.0, (2, 1): 170.0, (2, 2): 300.0, (4, 2): 520.0}
    for number, ((nodes, workers_per_node), speed) in enumerate(speeds.items()):
        world = nodes * workers_per_node
        run = record(
            number, strategy="ddp",
            cluster__nodes=nodes, cluster__workers_per_node=workers_per_node, cluster__device="cuda",
            dataset__train_size=500 * world if weak else 500, speed=speed, peak=30000.0,
            overrides=(f"cluster.nodes={nodes}", f"cluster.workers_per_node={workers_per_node}"),
        )  # fmt: skip
        enrich(run)
        run.metrics.total_steps = None
        runs.append(run)
    if swap:
        one, other = (runs[n] for n in swap)
        one.metrics, other.metrics = other.metrics, one.metrics
    return with_traces(path, runs)


def with_traces(path: Path, runs: Sequence[RunRecord], **how: Any) -> Path:
    """Write runs with their traces. Return the directory of the sweep."""
    write(path, *runs)
    for run in runs:
        write_traces(path / str(run.run.number), run, **how)
    return path


def many_runs(path: Path, count: int, *, samples: int = 60) -> Path:
    """Write many different runs; every hundredth has traces.

    They are written without copies of the records, so that thousands of them take little time.
    """
    template = asdict(enrich(record(0, peak=20000.0)))
    for number in range(count):
        directory = path / str(number)
        directory.mkdir(parents=True)
        template["run"].update(id=f"{number:012x}", number=number)
        template["config"]["train"].update(learning_rate=(1 + number) / 1e7)
        template["metrics"]["train_samples_per_second"] = 100 + number * 7919 % 1000
        template["memory"]["gpu"][0]["peak_mib"] = 20000 + number * 104729 % 9000
        (directory / "record.json").write_text(json.dumps(template))
        if number % 100 == 0:
            write_traces(directory, record(number, peak=20000.0), samples=samples)
    return path
