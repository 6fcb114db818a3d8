"""How good ``distexp choose`` is: an exhaustive sweep of its candidates, and a replay of the search on these records.

    python benchmarks/choose.py sweep OUT.json NAME GPUS [STEPS] OVERRIDE ...
    python benchmarks/choose.py replay OUT.json [LIMIT_GB ...]

``sweep`` runs all candidates of a training that may fit, and adds them to the file as the cell ``NAME, GPUS``. Those
that a search leaves out because they are slower, as with checkpointing, run too. A cell of the file does not run again.
The same command continues an interrupted sweep. ``replay`` searches each cell with the measured values, and prints
regret and cost. A memory limit removes the candidates that would not fit.

On GPUs, for example:

    python benchmarks/choose.py sweep docs/results/choose_h200.json bloom_560m 1 5 model=bloom_560m \
        dataset=squad_sample dataset.max_length=512 dataset.padding=max_length precision=bf16 \
        train.global_batch_size=64 train.compile=blocks 'choose.space=["offload=false"]'
    python benchmarks/choose.py replay docs/results/choose_h200.json 24 40 80
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf
from pathlib import Path
from random import Random
from shutil import rmtree
from typing import Any

from benchmarks.tables import markdown
from distexp.choose.candidate import CHECKPOINTING, MICRO_BATCH, Candidate, Objective, Status, Trial, rules_for
from distexp.choose.ranking import PlannedTrial, SearchResult
from distexp.choose.search import search
from distexp.choose.trials import EXCLUDED_STEPS, peak_mib
from distexp.plan.estimate import COMPILED
from distexp.runs.record import RunRecord, find_records
from distexp.runs.record_sections import Predicted
from distexp.runs.run_dir import SPEC
from distexp.system.files import read_json, write_json
from distexp.system.units import MIB_PER_GIB

DISTEXP = (sys.executable, "-m", "distexp")
CONTEXT_MIB = 700.0
"""GPU memory outside of torch's allocator."""

REPEAT_SEED = 43
"""Another seed than the default, so that the repeat is another run."""

WORKERS = "cluster.workers_per_node="
NOT_RUN = ("invalid", "the same as", "does not fit", "needs more")
"""Starts of the reasons of candidates that an exhaustive sweep leaves out too."""


@dataclass(frozen=True)
class Measured:
    """A candidate with its prediction and the record of its run.

    Attributes:
        overrides: Overrides of the candidate.
        workers: Number of workers.
        status: Status of its record.
        step_s: Median time of a step.
        samples_per_second: Throughput.
        peak_mib: Peak of the allocated memory.
        start_s: Time of the run outside of its steps.
        expected_mib: Predicted peak of the allocated memory; None if it was not predicted.
        forecast_s: Forecast of the step time.
    """

    overrides: list[str]
    workers: int
    status: str
    step_s: float | None = None
    samples_per_second: float | None = None
    peak_mib: float | None = None
    start_s: float = 0.0
    expected_mib: float | None = None
    forecast_s: float | None = None

    def gpu_seconds(self, steps: int, start_s: float | None = None) -> float:
        """Return the cost of a trial with some measured steps. A start may take less time than the measured one."""
        start = self.start_s if start_s is None else min(start_s, self.start_s)
        return self.workers * (start + (steps + EXCLUDED_STEPS) * (self.step_s or 0.0))

    def fits(self, limit_mib: float | None) -> bool:
        """Return whether it completed, also on a GPU with less memory."""
        fits = limit_mib is None or (self.peak_mib or 0.0) + CONTEXT_MIB <= limit_mib
        return self.status == "completed" and fits


@dataclass(frozen=True)
class SweepCell:
    """The exhaustive sweep of a training with some workers.

    Attributes:
        name: Name of the training.
        gpus: Number of workers.
        steps: Measured steps of each run.
        candidates: What was measured.
        repeat_start_s: ``start_s`` of a candidate that ran before, so that its compiled code is in the cache. None if
            it was not measured: then a repeat costs as much as a first trial.
        planned: Number of all candidates, if not all of them were run; None if they were.
        on_cpus: Whether its workers had no GPUs.
    """

    name: str
    gpus: int
    steps: int
    candidates: list[Measured] = field(default_factory=list)
    repeat_start_s: float | None = None
    planned: int | None = None
    on_cpus: bool = False


@dataclass(frozen=True)
class Noise:
    """Noise that a replay adds to the speeds.

    Attributes:
        deviation: Standard deviation of a trial's speed, relative to it.
        seed: Seed of the noise.
    """

    deviation: float = 0.0
    seed: int = 0


NO_NOISE = Noise()


@dataclass(frozen=True)
class Replay:
    """Result of a search on measured values.

    Attributes:
        regret: How much slower the winner is than the fastest candidate; 1 without a winner.
        share: GPU time of the search relative to that of the exhaustive sweep.
        trials: Number of trials.
        out_of_memory: Trials that ran out of memory.
        fitting: Number of candidates that fit.
        winner: The candidate that was chosen; None without one.
    """

    regret: float
    share: float
    trials: int
    out_of_memory: int
    fitting: int = 0
    winner: Measured | None = None


def replay(cell: SweepCell, limit_gb: float | None = None, noise: Noise = NO_NOISE) -> Replay | None:
    """Search a cell with its measured values; None if nothing fits.

    The exhaustive sweep runs all candidates. Those that run out of memory cost their start.
    """
    random = Random(noise.seed)
    limit = None if limit_gb is None else limit_gb * MIB_PER_GIB
    fitting = [candidate for candidate in cell.candidates if candidate.fits(limit)]
    if not fitting:
        return None
    by_overrides = {tuple(candidate.overrides): candidate for candidate in cell.candidates}
    tried: list[Trial] = []
    started: set[tuple[str, ...]] = set()

    def try_all(batch: Sequence[PlannedTrial]) -> list[Trial]:
        found = []
        for planned in batch:
            start_s = cell.repeat_start_s if planned.candidate.overrides in started else None
            started.add(planned.candidate.overrides)
            measured = _with_noise(by_overrides[planned.candidate.overrides], 1 + random.gauss(0, noise.deviation))
            found.append(_trial(measured, planned.steps, limit, start_s))
        tried.extend(found)
        return found

    candidates = [_candidate(candidate, limit) for candidate in cell.candidates]
    _prune_checkpointed(candidates)
    result = search(candidates, try_all, Objective.THROUGHPUT, rules=rules_for(on_cpus=cell.on_cpus))
    exhaustive = sum(
        candidate.gpu_seconds(cell.steps) if candidate.fits(limit) else candidate.workers * candidate.start_s
        for candidate in cell.candidates
    )
    return Replay(
        regret=_regret(result, by_overrides, fitting),
        share=sum(trial.gpu_seconds for trial in tried) / exhaustive,
        trials=len(tried),
        out_of_memory=sum(trial.status.startswith("oom") for trial in tried),
        fitting=len(fitting),
        winner=None if result.winner is None else by_overrides[result.winner.overrides],
    )


def _with_noise(measured: Measured, factor: float) -> Measured:
    """Return a candidate whose steps take longer by a factor."""
    if measured.step_s is None or measured.samples_per_second is None:
        return measured
    return replace(measured, step_s=measured.step_s * factor, samples_per_second=measured.samples_per_second / factor)


def _candidate(measured: Measured, limit_mib: float | None) -> Candidate:
    """Return a candidate as a search predicts it on a GPU with a limit. All sweeps on GPUs compile their blocks."""
    overrides = tuple(measured.overrides)
    family = tuple(text for text in overrides if not text.startswith(f"{MICRO_BATCH}="))
    size = next((int(text.partition("=")[2]) for text in overrides if text.startswith(f"{MICRO_BATCH}=")), 0)
    candidate = Candidate(overrides, family, size, measured.workers)
    candidate.expected_mib, candidate.forecast_s = measured.expected_mib, measured.forecast_s
    if limit_mib is not None and measured.expected_mib is not None:
        needed = measured.expected_mib + CONTEXT_MIB
        candidate.too_close = needed * (1 + COMPILED) > limit_mib
        candidate.predicted = Predicted(required_mib=needed, gpu_memory_mib=limit_mib)
        if needed * (1 - COMPILED) > limit_mib:
            candidate.prune("does not fit by prediction")
    return candidate


def _prune_checkpointed(candidates: Sequence[Candidate]) -> None:
    """Prune what a search prunes before its first trial: checkpointing of a micro-batch that fits without it."""
    fitting: dict[tuple[str, ...], int] = {}
    for candidate in candidates:
        if candidate.status is Status.WAITING and not candidate.too_close and candidate.expected_mib is not None:
            fitting[candidate.family] = max(fitting.get(candidate.family, 0), candidate.micro_batch)
    for candidate in candidates:
        other = tuple(text for text in candidate.family if not text.startswith(CHECKPOINTING))
        is_needed = other == candidate.family or candidate.micro_batch > fitting.get(other, 0)
        if candidate.status is Status.WAITING and not is_needed:
            candidate.prune("checkpointing is not needed")


def _trial(measured: Measured, steps: int, limit_mib: float | None, start_s: float | None = None) -> Trial:
    if not measured.fits(limit_mib):
        status = measured.status if measured.status != "completed" else "oom_gpu"
        return Trial(steps, status, gpu_seconds=measured.workers * measured.start_s, error=status)
    return Trial(
        steps,
        "completed",
        step_s=measured.step_s,
        samples_per_second=measured.samples_per_second,
        peak_allocated_mib=measured.peak_mib,
        gpu_seconds=measured.gpu_seconds(steps, start_s),
    )


def _regret(result: SearchResult, measured: dict[tuple[str, ...], Measured], fitting: Sequence[Measured]) -> float:
    best = max(candidate.samples_per_second or 0.0 for candidate in fitting)
    if result.winner is None:
        return 1.0
    return 1 - (measured[result.winner.overrides].samples_per_second or 0.0) / best


def read_cells(path: Path) -> list[SweepCell]:
    """Read the cells of a file; none if there is no file."""
    if not path.exists():
        return []
    return [
        SweepCell(**entry | {"candidates": [Measured(**one) for one in entry["candidates"]]})
        for entry in read_json(path)
    ]


def sweep(path: Path, name: str, gpus: int, steps: int, overrides: Sequence[str]) -> None:
    """Run all candidates of a training that may fit, and add their records to a file."""
    cells = read_cells(path)
    if any((cell.name, cell.gpus) == (name, gpus) for cell in cells):
        print(f"{name}, {gpus} workers: in {path} already")
        return
    candidates = _find_candidates(name, gpus, overrides)
    # An interrupted sweep continues in this folder.
    folder = path.with_suffix(f".{name}-{gpus}")
    # The last run repeats the most promising candidate, which shows what the start of a repeat costs.
    repeated = min(candidates, key=lambda each: each["forecast_s"] or inf)
    listed = [each["overrides"] for each in candidates]
    listed.append([*repeated["overrides"], f"train.seed={REPEAT_SEED}"])
    subprocess.run(_sweep_command(listed, steps, overrides, folder), check=False)
    measured = list(_read_measured(folder, [*candidates, repeated], gpus))
    if len(measured) < len(listed):
        sys.exit(f"{len(measured)} of {len(listed)} runs are done in {folder}: the same command continues the sweep")
    *measured, repeat = measured
    cells.append(SweepCell(name, gpus, steps, measured, repeat.start_s, on_cpus=_ran_on_cpus(folder)))
    write_json(path, [asdict(cell) for cell in cells])
    rmtree(folder)
    print(f"{name}, {gpus} workers: {len(measured)} candidates in {path}")


def _sweep_command(cells: Sequence[Sequence[str]], steps: int, overrides: Sequence[str], folder: Path) -> list[str]:
    """Return the command that runs all candidates of a sweep, or those that are missing in its folder."""
    total = steps + EXCLUDED_STEPS
    short = [f"train.max_steps={total}", f"train.num_epochs={total}", f"train.measure_after_step={EXCLUDED_STEPS}"]
    short += ["train.log_every=1", "train.evaluate=false", "dataset.eval_size=8"]
    training = [text for text in overrides if not text.startswith("choose.")]
    sweep = [f"sweep.cells={json.dumps(cells)}", "sweep.resume=true", f"hydra.sweep.dir={folder.absolute()}"]
    return [*DISTEXP, "--multirun", *training, *short, *sweep]


def _find_candidates(name: str, gpus: int, overrides: Sequence[str]) -> list[dict[str, Any]]:
    """Return the candidates of a training that may fit. Exit if the dry run fails, after it has printed its error."""
    # For the lowest memory, a search predicts all candidates, and prunes none because it is slower.
    dry_run = ["choose.dry_run=true", "choose.objective=memory"]
    command = [*DISTEXP, "choose", "--json", *overrides, *dry_run, f"choose.gpus=[{gpus}]"]
    found = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if found.returncode:
        sys.exit(f"{name}, {gpus} workers: distexp choose choose.dry_run=true failed with code {found.returncode}")
    return [candidate for candidate in json.loads(found.stdout)["candidates"] if _may_run(candidate)]


def _may_run(candidate: dict[str, Any]) -> bool:
    return candidate["status"] == Status.WAITING or not str(candidate["reason"]).startswith(NOT_RUN)


def _read_measured(folder: Path, candidates: Sequence[dict[str, Any]], gpus: int) -> Iterator[Measured]:
    """Yield the candidates whose runs left a record. The runs have the order of the candidates."""
    records = [(path, RunRecord.read(path)) for path in find_records(folder)]
    for path, record in sorted(records, key=lambda each: each[1].run.number):
        candidate = candidates[record.run.number]
        metrics = record.metrics
        wall_s = path.stat().st_mtime - path.with_name(SPEC).stat().st_mtime
        step_s = (metrics.step_time_s or {}).get("p50")
        yield Measured(
            candidate["overrides"],
            gpus,
            record.status,
            _rounded(step_s),
            _rounded(metrics.train_samples_per_second),
            _rounded(peak_mib(record)),
            round(max(0.0, wall_s - (metrics.total_steps or 0) * (step_s or 0.0)), 2),
            _rounded(candidate["expected_mib"]),
            _rounded(candidate["forecast_s"]),
        )


def _ran_on_cpus(folder: Path) -> bool:
    return all(RunRecord.read(path).config["cluster"]["device"] == "cpu" for path in find_records(folder))


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def replay_table(path: Path, limits_gb: Sequence[float | None]) -> str:
    """Return a table of the replays of all cells. A limit is in GiB."""
    rows = []
    for cell in read_cells(path):
        for limit in limits_gb or [None]:
            found = replay(cell, limit)
            shown = ["nothing fits", *[""] * 6] if found is None else _replay_values(cell, found)
            rows.append([cell.name, str(cell.gpus), "-" if limit is None else f"{limit:g} GiB", *shown])
    return markdown(REPLAY_HEADER, rows, text=(0, REPLAY_HEADER.index("winner")))


REPLAY_HEADER = (
    *("cell", "workers", "limit", "candidates that fit", "winner", "samples/s", "regret", "share of the GPU time"),
    *("trials", "out of memory"),
)


def _replay_values(cell: SweepCell, found: Replay) -> list[str]:
    """Return the texts of a row from the number of candidates on."""
    planned = f", of {cell.planned}" if cell.planned else ""
    winner = found.winner
    named = [] if winner is None else [text for text in winner.overrides if not text.startswith(WORKERS)]
    speed = "-" if winner is None or winner.samples_per_second is None else f"{winner.samples_per_second:,.1f}"
    return [
        f"{found.fitting} of {len(cell.candidates)}{planned}",
        f"`{' '.join(named)}`",
        speed,
        f"{100 * found.regret:.1f} %",
        f"{100 * found.share:.1f} %",
        str(found.trials),
        str(found.out_of_memory),
    ]


def main(arguments: Sequence[str]) -> None:
    """Run a sweep or a replay."""
    match arguments:
        case ["sweep", path, name, gpus, steps, *overrides] if steps.isdecimal():
            sweep(Path(path), name, int(gpus), int(steps), overrides)
        case ["sweep", path, name, gpus, *overrides]:
            sweep(Path(path), name, int(gpus), 10, overrides)
        case ["replay", path, *limits]:
            print(replay_table(Path(path), [float(limit) for limit in limits]), end="")
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
