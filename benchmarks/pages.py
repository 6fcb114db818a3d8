"""The tables of ``docs/results`` that are made from the committed records and measurements.

    python -m benchmarks.pages

prints the tables, by page. ``tests/test_results.py`` checks that the pages have them, and that the README has their
numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import forecast
from benchmarks.choose import replay_table
from benchmarks.measurement import REPOSITORY
from benchmarks.speed import read_results
from benchmarks.tables import MISSING, all_rows, markdown
from distexp.runs.step_files import PARTS
from distexp.strategies.parallel.checks import bubble_share

RESULTS = REPOSITORY / "docs" / "results"

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
    "memory/parts": ("memory_parts",),
    "cut/lora": ("cut_lora",),
    "cut": ("cut/tensor", "cut/mesh", "cut/context", "cut/recompute", "cut/pipeline"),
    "cut/mesh in fp32": ("cut/mesh_fp32",),
    "cut: expert, mixtral": ("cut/expert", "cut/mixtral"),
    "chapter 8": ("course/deepspeed",),
    "baselines": ("two_h200/ddp_baseline", "two_h200/fsdp_baseline", "two_h200/fsdp_custom_single"),
    "deepspeed/zero_stages": ("two_h200/deepspeed_zero_stages", "two_h200/deepspeed_pin_memory"),
    "deepspeed/model_sizes": ("two_h200/deepspeed_model_sizes",),
    "weak scaling": ("two_h200/deepspeed_weak_scaling", "two_h200/fsdp_custom_weak_scaling"),
    "time/step": ("two_h200/time_step",),
    "map/strategies": ("two_h200/map_strategies",),
    "map/strategies with ZeRO": ("two_h200/map_zero",),
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


def bandwidth_table(name: str) -> str:
    """Return the bus bandwidths of a preflight in GB/s, for every second size."""
    found = json.loads((RESULTS / name).read_text())["measurements"]
    operations = list(dict.fromkeys(one["operation"] for one in found))
    speeds = {(one["bytes"], one["operation"]): one["busbw_gbps"] for one in found}
    rows = [
        [f"{size:,}", *(f"{speeds[size, operation]:,.2f}" for operation in operations)]
        for size in sorted({one["bytes"] for one in found})[::2]
    ]
    return markdown(("bytes", *operations), rows, text=())


def scores_table(sweep: str) -> str:
    """Return the table of runs of fine-tuning: losses of the last epoch, scores, and the speed on one GPU."""
    rows = []
    for record in read_sweep(RESULTS / sweep):
        metrics, shown = record["metrics"], ("model=", "dataset.targets=", "train.learning_rate=", "engine=")
        numbers = (
            (metrics["train_losses"][-1], "{:.4f}"),
            (metrics["eval_losses"][-1], "{:.4f}"),
            (metrics["exact_match"], "{:.1f}"),
            (metrics["f1"], "{:.1f}"),
            (metrics["train_samples_per_second"], "{:,.0f}"),
            (max(gpu["peak_mib"] for gpu in record["memory"]["gpu"]), "{:,.0f}"),
        )
        name = " ".join(f"`{text}`" for text in record["run"]["overrides"] if text.startswith(shown))
        rows.append([name, *(MISSING if value is None else form.format(value) for value, form in numbers)])
    header = ("run", "train loss", "eval loss", "EM %", "F1 %", "samples/s", "GPU peak MiB")
    return markdown(header, rows, text=(0,))


def speed_table(name: str) -> str:
    """Return the table of a file that ``benchmarks/speed.py`` wrote."""
    return all_rows(read_results(RESULTS / name))


LOOPS_HEADER = ("model", "loop", "samples/s", "ratio", "peak MiB", "ratio", "MFU", "first process s", "later s")


def loops_table(name: str) -> str:
    """Return the table of files that ``benchmarks/any_model.py`` wrote: the median of the repeats of each loop."""
    found = json.loads((RESULTS / name).read_text())
    rows = []
    for model in dict.fromkeys(one["model"] for one in found):
        runs = {loop: [one for one in found if (one["model"], _loop(one)) == (model, loop)] for loop in LOOPS}
        theirs = {key: _median(runs["expert"], key) for key in ("samples_per_second", "peak_mib")}
        for loop, ones in runs.items():
            if not ones:
                continue
            cells = []
            for key, form in (("samples_per_second", "{:,.1f}"), ("peak_mib", "{:,.0f}")):
                own, other = _median(ones, key), theirs[key]
                ratio = f"{own / other:.2f}" if loop != "expert" and own and other else ""
                cells += [form.format(own) if own else MISSING, ratio]
            walls = [f"{one['wall_s']:.0f}" if one["status"] == "completed" else "stopped" for one in ones]
            rows.append([
                model if ones is next(filter(None, runs.values())) else "",
                LOOPS[loop],
                *cells,
                f"{100 * _median(ones, 'mfu'):.1f} %" if _median(ones, "mfu") else "",
                walls[0],
                *(walls[1:2] or [MISSING]),
            ])  # fmt: skip
    return markdown(LOOPS_HEADER, rows, text=(0, 1))


def _loop(run: dict[str, Any]) -> str:
    return "budget" if BUDGET in run.get("overrides", ()) else str(run["loop"])


BUDGET = "train.activation_budget=0.5"
LOOPS = {"ours": "`kernels=fast`", "budget": f"`{BUDGET}`", "expert": "expert"}


def _median(runs: Sequence[dict[str, Any]], key: str) -> float | None:
    """Return the median of a value over the runs that completed; None if there is none."""
    values = [run[key] for run in runs if run["status"] == "completed" and run.get(key) is not None]
    return median(values) if values else None


def sizes_table(name: str) -> str:
    """Return the table of runs of ``kernels=fast`` with several micro-batches and lengths."""
    rows = [
        [
            run["model"], str(run["micro_batch"]), f"{run['length']:,}", f"{run['samples_per_second']:,.1f}",
            f"{run['tokens_per_second']:,.0f}", f"{run['peak_mib']:,.0f}", f"{100 * run['mfu']:.1f} %",
        ]
        for run in json.loads((RESULTS / name).read_text())
    ]  # fmt: skip
    return markdown(("model", "micro-batch", "tokens", "samples/s", "tokens/s", "peak MiB", "MFU"), rows, text=(0,))


def options_table(name: str) -> str:
    """Return the table of runs that differ in one override."""
    rows = [
        [
            *(f"`{text}`" for text in run["overrides"]), f"{run['samples_per_second']:.1f}", f"{run['step_ms']:.1f}",
            f"{run['peak_mib']:,.0f}", f"{run['loss']:.4f}",
        ]
        for run in json.loads((RESULTS / name).read_text())
    ]  # fmt: skip
    return markdown(("override", "samples/s", "step ms", "peak MiB", "train loss"), rows, text=(0,))


def proofs_table(name: str) -> str:
    """Return the table of proofs of ``distexp verify``: the largest errors of all phases."""
    rows = []
    for proof in json.loads((RESULTS / name).read_text()):
        chosen = [text for text in proof["command"].split() if text.startswith(("strategy=", "parallel."))]
        errors = (f"{proof['worst'][what]:.0e}" for what in ("loss", "gradient", "norm", "update"))
        rows.append([f"`{' '.join(chosen)}`", proof["precision"], proof["status"], *errors])
    return markdown(("options", "precision", "result", "loss", "gradients", "norm", "updates"), rows, text=(0, 1, 2))


def lora_table(name: str) -> str:
    """Return the table of the records of trainings with LoRA."""
    rows = []
    for record in json.loads((RESULTS / name).read_text()):
        train, metrics = record["config"]["train"], record["metrics"]
        rows.append([
            str(train["micro_batch_size"]),
            "yes" if train["activation_checkpointing"] else "no",
            f"{metrics['tokens_per_second']:,.0f}",
            f"{max(rank['peak_allocated_mib'] for rank in record['memory']['torch']):,.0f}",
            f"{100 * metrics['mfu']:.1f} %",
            f"{100 * metrics['hfu']:.1f} %",
        ])  # fmt: skip
    return markdown(("micro-batch", "checkpointing", "tokens/s", "peak MiB", "MFU", "HFU"), rows, text=(1,))


def workers_table(name: str) -> str:
    """Return the table of runs of any_model.py on one and several GPUs, of both loops."""
    rows = []
    for run in json.loads((RESULTS / name).read_text()):
        rows.append([
            f"`{' '.join([*run['overrides'], 'strategy=' + run['strategy']])}`",
            LOOPS[run["loop"]],
            str(run["workers"]),
            f"{run['length']:,}",
            f"{run['samples_per_second'] * run['length']:,.0f}",
            f"{run['samples_per_second'] * run['length'] / run['workers']:,.0f}",
            f"{run['peak_mib']:,.0f}",
            f"{100 * run['mfu']:.1f} %" if run.get("mfu") else MISSING,
        ])  # fmt: skip
    header = ("run", "loop", "GPUs", "tokens", "tokens/s", "of each GPU", "peak MiB", "MFU")
    return markdown(header, rows, text=(0, 1))


def search_table(name: str) -> str:
    """Return the table of the candidates that a whole search of ``distexp choose`` tried."""
    rows = []
    for tried in json.loads((RESULTS / name).read_text())["tried"]:
        speeds = [(trial["number"], f"{trial['samples_per_second']:.1f}") for trial in tried["measured"]["trials"]]
        options = [text for text in tried["overrides"] if not text.startswith("cluster.")]
        rows.append(
            [
                f"`{' '.join(options)}`",
                ", ".join(f"{speed} ({number})" for number, speed in speeds),
                f"{tried['measured']['peak_allocated_mib']:,.0f}",
                f"{tried['expected_mib']:,.0f}",
            ]
        )
    return markdown(("candidate", "samples/s (number of the trial)", "peak MiB", "predicted"), rows, text=(0, 1))


def memory_table(name: str) -> str:
    """Return the table of runs whose memory was predicted before them, in MiB on the fullest GPU."""
    predicted, measured = (
        json.loads((RESULTS / f"plan_{kind}_{name}.json").read_text())["cells"] for kind in ("predicted", "measured")
    )
    rows = []
    for cell, found in measured.items():
        first = predicted[cell]
        shown = [text for text in cell.split() if not text.startswith(("strategy=fsdp", "cluster."))]
        numbers: list[str] = []
        for figure in ("peak_allocated_mib", "peak_reserved_mib"):
            error = 100 * (first[figure] / found[figure] - 1)
            numbers += [f"{found[figure]:,.0f}", f"{first[figure]:,.0f}", f"{round(error, 1) + 0:+.1f} %"]
        rows.append([" ".join(text.removeprefix("model.name=").removeprefix("train.") for text in shown), *numbers])
    return markdown(("run", "measured", "predicted", "error", "reserved", "predicted", "error"), rows, text=(0,))


def bubble_table(name: str) -> str:
    """Return the table of the bubbles of pipelines. ``measured_bubble`` explains the measured one."""
    runs = json.loads((RESULTS / name).read_text())
    rows = []
    for run in runs:
        schedule, number = run["schedule"], run["micro_batches"]
        share = measured_bubble(run, [other for other in runs if other["schedule"] == schedule])
        predicted = bubble_share(run["workers"], schedule, number)
        rows.append([
            schedule, str(number), f"{run['step_ms']:,.1f}", f"{run['tokens_per_second']:,}", f"{100 * share:.1f} %",
            f"{100 * predicted:.1f} %", f"{100 * (predicted / share - 1):+.0f} %", f"{run['peak_allocated_mib']:,}",
        ])  # fmt: skip
    header = ("schedule", "micro-batches", "step ms", "tokens/s", "measured bubble", "predicted", "error", "peak MiB")
    return markdown(header, rows, text=(0,))


def measured_bubble(run: dict[str, Any], runs: Sequence[dict[str, Any]]) -> float:
    """Return the share of a step that is not the work on its micro-batches.

    The work on one is the time that a further one adds, between the fewest and the most micro-batches of ``runs``.
    """
    first, last = (extreme(runs, key=lambda each: each["micro_batches"]) for extreme in (min, max))
    work = (last["step_ms"] - first["step_ms"]) / (last["micro_batches"] - first["micro_batches"])
    return 1 - run["micro_batches"] * work / run["step_ms"]


def checks_table(name: str) -> str:
    """Return the table of the checks in a file of ``benchmarks/explain.py``."""
    rows = json.loads((RESULTS / name).read_text())["checks"]
    return markdown(("check", "run", "found", "as expected"), rows, text=(0, 1, 2, 3))


def parts_table(name: str) -> str:
    """Return the parts of the median step in a file of explain.py or any_model.py, in ms. A row is a rank of a run."""
    content = json.loads((RESULTS / name).read_text())
    runs = [run for run in (content if isinstance(content, list) else content["runs"]) if run.get("step_breakdown")]
    ranks = [(run, rank) for run in runs for rank in run["step_breakdown"]]
    parts = [part for part in PARTS if any(rank.get(f"{part}_ms") for _, rank in ranks)]
    rows = []
    for run, rank in ranks:
        times = [rank.get(f"{part}_ms") or 0.0 for part in parts]
        median_ms = 1000 * run["step_time_s"]["p50"] if "step_time_s" in run else run["step_ms"]
        steps = (median_ms, rank["profiled_step_ms"])
        label = f"{run['check']}, {run['name']}" if "check" in run else f"{run['model']} {run['micro_batch']}"
        rows.append([label, str(rank["rank"]), *(f"{ms:.1f}" for ms in (*times, *steps))])
    titles = [PARTS[part] for part in parts]
    return markdown(("run", "rank", *titles, "median step", "profiled step"), rows, text=(0,))


def _forecast_table(name: str) -> str:
    rows = forecast.read_rows(RESULTS / name)
    return forecast.table(rows, len(rows)).partition("\n\n")[0] + "\n"


def _replayed(name: str) -> str:
    return replay_table(RESULTS / name, (24.0, 40.0, 80.0))


def _all_files(pattern: str, *makers: Callable[[str], str]) -> dict[str, str]:
    names = [path.name for path in sorted(RESULTS.glob(pattern))]
    return {f"{make.__name__} {name}": make(name) for name in names for make in makers}


TABLES: dict[str, dict[str, tuple[Callable[[str], str], str]]] = {
    "any-model.md": {
        "loops": (loops_table, "any_model_h100.json"),
        "loops H200": (loops_table, "any_model_h200.json"),
        "loops with a budget": (loops_table, "any_model_budget_h200.json"),
        "large batches": (sizes_table, "large_batches_h200.json"),
        "large batches, parts": (parts_table, "large_batches_h200.json"),
        "dense": (sizes_table, "dense_h200.json"),
        "float8": (options_table, "float8_h200.json"),
        "activations": (options_table, "activations_h200.json"),
        "LoRA": (lora_table, "lora8b_h100.json"),
        "8 billion, two GPUs": (workers_table, "llama8b_h200.json"),
    },
    "plan.md": {"models": (memory_table, "models")},
    "model-parallel.md": {
        "memory": (memory_table, "parallel"),
        "memory of chapter 10": (memory_table, "cut"),
        "bubble": (bubble_table, "pipeline_h200.json"),
        "tensor": (loops_table, "tensor_h200.json"),
        "proofs": (proofs_table, "verify_parallel_h200.json"),
    },
    "forecast.md": {"two GPUs": (_forecast_table, "forecast_two_h200.json")},
    "choose.md": {
        "OPT and Gemma, replayed": (_replayed, "choose_opt_gemma.json"),
        "OPT": (search_table, "search_opt_h200.json"),
        "Gemma": (search_table, "search_gemma_h200.json"),
    },
}
"""How the tables of a page are made, by their titles, and from which file. The other pages have one for each file."""

PAGES = ("speed.md", "exercises.md", "explain.md", *TABLES)


def tables(page: str) -> dict[str, str]:
    """Return the tables of a page by their titles."""
    if page == "speed.md":
        return _all_files("speed_*.json", speed_table)
    if page == "explain.md":
        return _all_files("explain_*.json", checks_table, parts_table)
    if page == "exercises.md":
        course = {
            "chapter 6": bandwidth_table("preflight_two_h200.json"),
            "chapter 7": scores_table("course/fine_tuning"),
        }
        return course | {title: exercise_table(sweeps) for title, sweeps in EXERCISES.items()}
    return {title: make(name) for title, (make, name) in TABLES[page].items()}


def main() -> None:
    """Print all tables."""
    for page in PAGES:
        for title, table in tables(page).items():
            print(f"{page}, {title}:\n\n{table}")


if __name__ == "__main__":
    main()
