"""The tables of ``docs/results`` that are made from the committed records and measurements.

    python -m benchmarks.pages

prints the tables, by page. ``tests/test_results.py`` checks that the pages have them, and that the README has their
numbers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measurement import REPOSITORY
from benchmarks.speed import read_results
from benchmarks.tables import MISSING, all_rows, markdown

RESULTS = REPOSITORY / "docs" / "results"

PAGES = ("speed.md", "exercises.md")

EXERCISES = {
    "fsdp/sharding": ("fsdp_sharding",),
    "fsdp/multi_gpu": ("fsdp_multi_gpu",),
    "fsdp/custom_multi_gpu": ("fsdp_custom_multi_gpu",),
    "deepspeed": (
        "deepspeed/baseline",
        "deepspeed/zero_offload_single_gpu",
        "deepspeed/two_gpu_stages",
    ),
    "ddp/multi_gpu": ("ddp_multi_gpu",),
}
"""Sweeps of each table of exercises.md."""

HEADER = (
    "run",
    "GPUs",
    "samples/s",
    "step ms",
    "train loss",
    "GPU peak MiB",
    "torch peak MiB",
    "states MiB",
    "CPU peak MiB",
)


def read_sweep(folder: Path) -> list[dict[str, Any]]:
    """Return the records of a sweep, in the order of its runs."""
    paths = sorted(folder.glob("*/record.json"), key=lambda path: int(path.parent.name))
    return [json.loads(path.read_text()) for path in paths]


def exercise_table(sweeps: Sequence[str]) -> str:
    """Return the table of an exercise, or of several in the order of their sweeps."""
    rows = []
    for sweep in sweeps:
        records = read_sweep(RESULTS / sweep)
        common = set.intersection(*(set(record["run"]["overrides"]) for record in records))
        for record in records:
            varied = [f"`{text}`" for text in record["run"]["overrides"] if text not in common]
            exercise = f"{sweep.partition('/')[2]} " if len(sweeps) > 1 else ""
            rows.append([f"{exercise}{' '.join(varied)}".strip(), *_metrics(record)])
    return markdown(HEADER, rows, text=(0,))


def _metrics(record: dict[str, Any]) -> list[str]:
    metrics, memory = record["metrics"], record["memory"]
    numbers = (
        (record["built"]["world_size"], "{}"),
        (metrics["train_samples_per_second"], "{:,.1f}"),
        (1000 * metrics["step_time_s"]["p50"], "{:,.1f}"),
        (metrics["train_loss"], "{:.4f}"),
        (max((gpu["peak_mib"] for gpu in memory["gpu"]), default=None), "{:,.0f}"),
        (max((rank["peak_allocated_mib"] for rank in memory["torch"]), default=None), "{:,.0f}"),
        (max((rank["states_mib"] for rank in memory["torch"]), default=None), "{:,.0f}"),
        (max(node["peak_mib"] for node in memory["cpu"]), "{:,.0f}"),
    )
    return [MISSING if value is None else form.format(value) for value, form in numbers]


def speed_table(name: str) -> str:
    """Return the table of a file that ``benchmarks/speed.py`` wrote."""
    return all_rows(read_results(RESULTS / name))


def tables(page: str) -> dict[str, str]:
    """Return the tables of a page by their titles."""
    if page == "speed.md":
        return {path.name: speed_table(path.name) for path in sorted(RESULTS.glob("speed_*.json"))}
    return {title: exercise_table(sweeps) for title, sweeps in EXERCISES.items()}


def main() -> None:
    """Print all tables."""
    for page in PAGES:
        for title, table in tables(page).items():
            print(f"{page}, {title}:\n\n{table}")


if __name__ == "__main__":
    main()
