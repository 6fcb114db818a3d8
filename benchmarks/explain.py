"""Checks of ``distexp explain`` on real runs: parts, collectives, slow ranks, what measuring costs, causes, energy.

Usage: ``python benchmarks/explain.py --gpus 2 dataset.train_path=T.json dataset.eval_path=E.json``.
See ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import signal
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.commands import Commands, Record, Run, select, sweep_name
from benchmarks.profiling import CLOCKS, PAIRS, compare_pairs, paired_runs, read_times
from benchmarks.tables import markdown
from benchmarks.watching import Shift, estimate_shift, read_differences
from distexp.runs.step_files import PARTS

TEXT = ("model=bloom_560m", "model.init=random", "dataset=squad", "dataset.padding=max_length", "precision=bf16")
SHORT = (
    "train.max_steps=32",
    "train.measure_after_step=8",
    "train.gradient_accumulation_steps=1",
    "train.profile_steps=3",
)
TINY = ("model=bloom_tiny", "dataset=squad_sample", "train.max_steps=60", "train.gradient_accumulation_steps=1")
SLOW = ("model._target_=tests.helpers.slow_rank.build",)
NO_LINKS = "cluster.environment={NCCL_P2P_DISABLE:'1',NCCL_SHM_DISABLE:'1'}"
"""NCCL over sockets, which makes a run communication-bound."""

SUM_BOUND, COMMUNICATION_BOUND, ENERGY_BOUND, COST_BOUND = 0.02, 3.0, 0.02, 0.01
"""Bounds: of the sum of the parts, relative; of exposed communication in percentage points; of twice the energy; of
what a measurement adds to a step, relative."""

ENERGY_STEPS = (1000, 2000)
"""Steps of the runs on one GPU whose energy is compared."""

UNMEASURED_STEPS = 8
"""First steps of the runs of ``profiling``, which are left out."""

Rows = Iterator[tuple[str, str, bool | None]]
"""Name, what was found, and whether it is as expected; None: no bound."""


@dataclass(frozen=True)
class Check:
    """Runs, and the rows of the table that they give."""

    runs: tuple[Run, ...]
    rows: Callable[[dict[str, Record], Sequence[Run]], Rows] = field(compare=False)


def strategies(workers: int = 2) -> dict[str, tuple[str, ...]]:
    """Return the overrides of the strategies for several workers."""
    place = f"cluster.workers_per_node={workers}"
    return {"ddp": ("strategy=ddp", place), "fsdp": ("strategy=fsdp", place), "zero2": ("zero_stage=2", place)}


def parts_runs() -> Iterator[Run]:
    """Yield runs with small and large micro-batches on one and two workers, those of a strategy together."""
    batches = {size: (*TEXT, *SHORT, f"train.micro_batch_size={size}") for size in (1, 32)}
    for size, batch in batches.items():
        yield Run(f"single {size}", (*batch, "strategy=single"))
    for (name, chosen), size in itertools.product(strategies().items(), batches):
        yield Run(f"{name} {size}", (*batches[size], *chosen), 2)


def parts_rows(records: dict[str, Record], runs: Sequence[Run]) -> Rows:
    """Compare the sum of the parts of each rank with the median step of the steps that are not profiled."""
    for run in runs:
        metrics = records[run.name]["metrics"]
        median = 1000 * metrics["step_time_s"]["p50"]
        errors = []
        for rank in metrics["step_breakdown"] or []:
            errors.append(sum(rank[f"{part}_ms"] or 0.0 for part in PARTS) / median - 1)
        worst = max(errors, key=abs, default=math.nan)
        sentence = (metrics["explanation"] or {}).get("sentence", "")
        yield run.name, f"step {median:.1f} ms, sum {worst:+.1%}: {sentence}", abs(worst) <= SUM_BOUND


def silent_runs() -> Iterator[Run]:
    """Yield runs with and without collectives."""
    silent = {"ddp": "SilentDDP", "fsdp": "SilentFSDP"}
    for (name, class_), size in ((pair, size) for pair in silent.items() for size in (4, 16)):
        chosen = (*TEXT, *SHORT, f"train.micro_batch_size={size}", *strategies()[name])
        yield Run(f"{name} {size}", chosen, 2)
        target = f"strategy._target_=benchmarks.without_collectives.{class_}"
        yield Run(f"{name} {size} silent", (*chosen, target), 2)


def silent_rows(records: dict[str, Record], runs: Sequence[Run]) -> Rows:
    """Compare exposed communication and waiting with what a step gains without collectives, in percentage points.

    The rank that waits least decides. The other ranks only wait for it, and this time is no gain.
    """
    for run in (run for run in runs if f"{run.name} silent" in records):
        metrics, silent = records[run.name]["metrics"], records[f"{run.name} silent"]["metrics"]
        step, without = (part["step_time_s"]["p50"] for part in (metrics, silent))
        ranks = metrics["step_breakdown"] or []
        if not ranks:
            yield run.name, "the profiled step has no parts", None
            continue
        slowest = min(ranks, key=lambda rank: float(rank["waiting_ms"]))
        lost_ms = slowest["exposed_communication_ms"] + slowest["waiting_ms"]
        found, gained = 100 * lost_ms / slowest["step_ms"], 100 * (1 - without / step)
        text = f"exposed and waiting {found:.1f} %, gained without collectives {gained:.1f} %"
        yield run.name, text, abs(found - gained) <= COMMUNICATION_BOUND


def straggler_runs() -> Iterator[Run]:
    """Yield 20 runs in which rank 1 sleeps 20 ms in each step, and five in which no rank sleeps.

    Those of a strategy follow each other, because they share a start-up.
    """
    for number in sorted(range(25), key=lambda number: number % 3):
        name, chosen = list(strategies().items())[number % 3]
        slow = number < 20
        overrides = (*TINY, *chosen, f"train.seed={number}", *(SLOW if slow else ()))
        yield Run(f"{number} {name} {'slow' if slow else 'clean'}", overrides, 2, "[1]" if slow else "[]")


def straggler_rows(records: dict[str, Record], runs: Sequence[Run]) -> Rows:
    """Compare the named ranks with the slow one."""
    for run in runs:
        found = [entry["rank"] for entry in records[run.name]["metrics"]["stragglers"] or []]
        yield run.name, f"named {found}", str(found) == run.expected


def watching_runs() -> Iterator[Run]:
    """Yield a run for each strategy. In each of them one step of each pair is watched."""
    watching = ("engine._target_=benchmarks.watching.PairedWatching", "train.measure_after_step=8")
    for name, chosen in strategies().items():
        batch = ("train.micro_batch_size=4", "train.gradient_accumulation_steps=1", "train.max_steps=1000")
        yield Run(name, (*TEXT, *batch, *chosen, *watching), 2)


def watching_rows(records: dict[str, Record], runs: Sequence[Run]) -> Rows:
    """Compare the watched steps with the unwatched ones."""
    for run in runs:
        record = records[run.name]
        differences = read_differences(Path(record["directory"]), run.workers)
        shift, median = estimate_shift(differences), 1000 * record["metrics"]["step_time_s"]["p50"]
        text = f"step {median:.1f} ms, watched {describe_shift(shift, len(differences))}"
        yield run.name, text, is_cheap(shift)


def describe_shift(shift: Shift, pairs: int) -> str:
    """Return a relative difference with its interval."""
    return f"{shift.median:+.2%} (95 % interval {shift.low:+.2%} to {shift.high:+.2%}, {pairs:,} pairs)"


def is_cheap(shift: Shift) -> bool | None:
    """Return whether a measurement costs at most the bound; None if the interval has the bound in it."""
    decided = shift.high <= COST_BOUND or shift.low > COST_BOUND
    return shift.high <= COST_BOUND if decided else None


def profiling_runs() -> Iterator[Run]:
    """Yield pairs of runs on one and on two workers, of which one profiles three steps in its middle."""
    batch = ("train.micro_batch_size=1", "train.gradient_accumulation_steps=1", "dataset.eval_size=16")
    steps = (f"train.measure_after_step={UNMEASURED_STEPS}", "train.max_steps=68")
    yield from paired_runs("single", (*TEXT, *batch, *steps, "strategy=single"), 1)
    yield from paired_runs("ddp", (*TEXT, *batch, *steps, *strategies()["ddp"]), 2)


def profiling_rows(records: dict[str, Record], runs: Sequence[Run]) -> Rows:
    """Compare the steps before and after the profile with the same steps of the runs without a profile."""
    for name in dict.fromkeys(run.name.split()[0] for run in runs):
        pairs = [[f"{name} {pair} {kind}" for kind in ("plain", "profiled")] for pair in range(PAIRS)]
        complete = [pair for pair in pairs if all(run in records for run in pair)]
        without = [run for _, run in complete if not records[run]["metrics"]["step_breakdown"]]
        if len(complete) < len(pairs) or without:
            yield name, f"{len(complete)} of {len(pairs)} pairs, and {len(without)} of them have no profile", None
            continue
        plain, profiled = ([read_times(records[run]) for run in side] for side in zip(*pairs, strict=True))
        for part, clock in itertools.product(("before", "after", "profiled"), CLOCKS):
            sides = [
                [times.of(part, clock, unmeasured=UNMEASURED_STEPS) for times in side] for side in (plain, profiled)
            ]
            shift, median = compare_pairs(*sides), statistics.median(itertools.chain(*sides[0]))
            text = f"{CLOCKS[clock]} {median:.1f} ms, with a profile {describe_shift(shift, len(pairs))}"
            yield f"{name}: {part}", text, None if part == "profiled" else is_cheap(shift)


def cause_runs() -> Iterator[Run]:
    """Yield runs that were built to be bound by something."""
    yield Run("launches", (*TEXT, *SHORT, "strategy=single", "train.micro_batch_size=1"), 1, "launch_idle")
    yield Run("compute", (*TEXT, *SHORT, "strategy=single", "train.micro_batch_size=32"), 1, "compute")
    slow_links = (*TEXT, *SHORT, *strategies()["ddp"], "train.micro_batch_size=1", "train.max_steps=16", NO_LINKS)
    yield Run("communication", slow_links, 2, "exposed_communication")
    images = (
        "model=resnet50",
        "dataset=synthetic",
        "dataset.image_size=224",
        "dataset.num_workers=0",
        "precision=bf16",
    )
    data = (*images, *SHORT, "strategy=single", "train.micro_batch_size=64", "dataset.train_size=2048")
    yield Run("data", data, 1, "data_wait")


def cause_rows(records: dict[str, Record], runs: Sequence[Run]) -> Rows:
    """Compare the named loss with the intended one."""
    for run in runs:
        explanation = records[run.name]["metrics"]["explanation"] or {}
        yield (
            run.name,
            f"{explanation.get('loss')}: {explanation.get('sentence')}",
            explanation.get("loss") == run.expected,
        )


def energy_runs() -> Iterator[Run]:
    """Yield a run, one with twice the steps, and one on two GPUs."""
    gpt = ("model=gpt", "dataset=synthetic", "dataset.max_length=512", "dataset.train_size=32768", "precision=bf16")
    batch = ("train.micro_batch_size=16", "train.gradient_accumulation_steps=1", "train.measure_after_step=8")
    for steps in ENERGY_STEPS:
        yield Run(f"{steps} steps", (*gpt, *batch, "strategy=single", f"train.max_steps={steps}"))
    yield Run("two GPUs", (*gpt, *batch, *strategies()["ddp"], "train.max_steps=1000"), 2)


def energy_rows(records: dict[str, Record], runs: Sequence[Run]) -> Rows:
    """Compare the counter with the integral of the power, and twice the steps with twice the energy."""
    for run in runs:
        energy = records[run.name]["metrics"]["energy"] or {}
        counter, power = energy.get("gpu_j"), energy.get("gpu_j_by_power")
        if not counter or not power:
            yield run.name, "no energy counter", None
            continue
        text = f"counter {counter:,.0f} J, power {power:,.0f} J, training {energy['gpu_j_training']:,.0f} J"
        yield run.name, text, abs(power / counter - 1) <= 0.03
    once, twice = (
        records[f"{steps} steps"]["metrics"]["energy"] or {} if f"{steps} steps" in records else {}
        for steps in ENERGY_STEPS
    )
    if once.get("gpu_j_training") and twice.get("gpu_j_training"):
        ratio = twice["gpu_j_training"] / once["gpu_j_training"]
        yield "twice the steps", f"training energy x {ratio:.3f}", abs(ratio / 2 - 1) <= ENERGY_BOUND


CHECKS = {
    "parts": Check(tuple(parts_runs()), parts_rows),
    "collectives": Check(tuple(silent_runs()), silent_rows),
    "stragglers": Check(tuple(straggler_runs()), straggler_rows),
    "watching": Check(tuple(watching_runs()), watching_rows),
    "profiling": Check(tuple(profiling_runs()), profiling_rows),
    "causes": Check(tuple(cause_runs()), cause_rows),
    "energy": Check(tuple(energy_runs()), energy_rows),
}


def main(arguments: list[str] | None = None) -> list[list[str]]:
    """Run the checks, print a table, and write it to ``table.md``. The same command continues an interrupted one."""
    options = parse(arguments)
    commands = Commands(options)
    facts: list[dict[str, Any]] = []
    rows = [row for name in options.checks for row in check_rows(name, CHECKS[name], commands, facts)]
    if options.json:
        Path(options.json).write_text(json.dumps({"checks": rows, "runs": facts}, indent=1) + "\n")
    text = markdown(["check", "run", "found", "as expected"], rows, text=(0, 1, 2, 3))
    (commands.folder / "table.md").write_text(text)
    print(f"\n{text}")
    return rows


def check_rows(name: str, check: Check, commands: Commands, facts: list[dict[str, Any]]) -> Iterator[list[str]]:
    """Run a check, yield its rows, and add what is known of its runs to a list."""
    runs = select(check.runs, commands.options.only)
    found = commands.run_all(sweep_name(name, commands.options.only), runs)
    facts += [{"check": name, "name": run, **facts_of(record)} for run, record in found.items()]
    records = {run: record for run, record in found.items() if record["status"] == "completed"}
    for run in runs:
        if run.name not in records:
            yield [name, run.name, found[run.name]["status"] if run.name in found else "not run", ""]
    if len(records) == len(runs) or name in ("parts", "stragglers", "watching", "profiling", "causes"):
        for title, text, good in check.rows(records, [run for run in runs if run.name in records]):
            yield [name, title, text, {True: "yes", False: "NO", None: ""}[good]]


def facts_of(record: Record) -> dict[str, Any]:
    """Return what the tables of ``docs/results/explain.md`` have of a run, and what it was."""
    metrics, environment = record["metrics"], record["environment"] or {}
    names = ("step_time_s", "step_breakdown", "explanation", "energy", "train_samples_per_second")
    return {
        "status": record["status"],
        "commit": record["run"]["git_sha"],
        "clean": record["run"]["git_dirty"] is False,
        "overrides": [text for text in record["run"]["overrides"] if "/" not in text],
        **{name: environment.get(name) for name in ("gpu_name", "torch", "python", "transformers")},
        **{name: metrics.get(name) for name in names},
        "parts": record["memory"]["parts"],
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse and check the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "overrides", nargs="*", metavar="KEY=VALUE", help="overrides of all runs on text, such as the paths of the data"
    )
    add("--checks", default=",".join(CHECKS), help="some of them; default: all")
    add("--only", default="", help="texts in the names of the runs, such as 'fsdp 1,zero2'; default: all")
    add("--gpus", type=int, default=2, help="GPUs to use; 2 for most checks")
    add("--budget-s", type=float, default=math.inf, help="time after which no further run starts")
    add("--results", default="benchmark_results/explain", help="folder of the runs")
    add("--json", default="", help="file that gets the checks, and what is known of the runs")
    options = parser.parse_intermixed_args(arguments)
    options.checks = options.checks.split(",")
    for name in options.checks:
        if name not in CHECKS:
            parser.error(f"--checks: {name} is unknown: use {', '.join(CHECKS)}")
    return options


if __name__ == "__main__":
    # SIGTERM must end the processes of a run too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    main()
