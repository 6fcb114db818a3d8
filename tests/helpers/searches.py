"""Searches of ``distexp choose`` in the process of the test, with trials that are never run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console

from distexp.choose.command import run_choose
from distexp.config import Config
from distexp.launch.launcher import TrialLauncher, TrialRunner
from distexp.launch.run_dirs import AssignedRun, GitState
from distexp.runs.metrics import Metrics
from distexp.runs.record import RunRecord
from distexp.runs.record_sections import Built, RunError
from distexp.runs.run_dir import METRICS, RECORD, SPEC
from tests.helpers.planning import FormulaPlanner, composed

BASE = ("model=bloom_tiny", "dataset=squad_sample", "train.global_batch_size=8", "command=choose")


def usual_speed(config: Config) -> float:
    """Return samples per second: more with larger micro-batches and more workers, and DDP is the fastest."""
    factor = {"single": 1.0, "ddp": 1.2, "fsdp": 1.1, "deepspeed": 0.9}[config.strategy.name]
    return 10.0 * factor * config.cluster.world_size * (1 + 0.1 * config.train.micro_batch)


def usual_loss(config: Config, step: int) -> float:
    """Return the loss of a step, the same for all configurations."""
    return 3.0 / step


@dataclass
class FakeLauncher:
    """Launcher that writes records in place of running trials.

    Attributes:
        speed: Returns the speed of a configuration.
        loss: Returns the loss of a configuration at a step.
        fails: Returns the status of a configuration that fails; empty if it completes.
        interrupt_after: Number of trials after which Ctrl-C arrives.
        seconds: Duration of each trial, with its start-up.
        first_seconds: Duration of the first trial; None: as the others.
        dropout: Rate of the model in all trials; None: it is unknown.
        ran: Configurations of the trials that ran.
    """

    speed: Callable[[Config], float] = usual_speed
    loss: Callable[[Config, int], float] = usual_loss
    fails: Callable[[Config], str] = lambda config: ""
    interrupt_after: int | None = None
    seconds: float = 0.0
    first_seconds: float | None = None
    dropout: float | None = None
    ran: list[Config] = field(default_factory=list)

    @contextmanager
    def runner(self, sweep_dir: Path, console: Console) -> Iterator[TrialRunner]:
        """Yield the runner."""

        def run_all(runs: Sequence[AssignedRun], after_each: Callable[[], None]) -> None:
            for run in runs:
                if self.interrupt_after == len(self.ran):
                    raise KeyboardInterrupt
                self._run(run)
                after_each()

        yield TrialRunner(run_all, GitState(None, None))

    def _run(self, run: AssignedRun) -> None:
        config = run.cell.config
        assert config is not None
        assert run.composed.hydra.job.num == run.info.number, "Hydra needs the number to start the run"
        self.ran.append(config)
        (run.directory / SPEC).write_text("{}")
        status = self.fails(config) or "completed"
        steps = config.train.max_steps or 0
        metrics = Metrics(
            train_samples_per_second=self.speed(config),
            train_runtime=1.0,
            total_steps=steps,
            step_time_s={"p50": 8 / self.speed(config)},
        )
        lines = [{"step": step, "loss": self.loss(config, step)} for step in range(1, steps + 1)]
        (run.directory / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
        error = None if status == "completed" else RunError("SomeError", f"it is {status}")
        record = RunRecord(status, run.info, asdict(config), error, metrics=metrics if error is None else Metrics())
        record.memory["torch"] = [{"rank": 0, "peak_allocated_mib": 1000.0 * config.train.micro_batch}]
        if self.dropout is not None:
            types = ("float32", "float32", "AdamW", 1)
            record.built = Built(
                config.strategy.name, "native", "none", 2, [], 0, None, "none", *types, dropout=self.dropout
            )
        record.write(run.directory)
        is_first = len(self.ran) == 1 and self.first_seconds is not None
        ended_at = (run.directory / SPEC).stat().st_mtime + (self.first_seconds if is_first else self.seconds)
        os.utime(run.directory / RECORD, (ended_at, ended_at))


def run_search(
    folder: Path,
    launcher: TrialLauncher,
    *arguments: str,
    planner: FormulaPlanner | None = None,
    config_dir: Path | None = None,
) -> None:
    """Search in a folder. A second search there continues the first."""
    with composed([*BASE, *arguments], config_dir=config_dir) as (cells, make):
        master = cells[0].composed
        master.hydra.sweep.dir = str(folder)
        master.hydra.overrides.hydra = [f"hydra.sweep.dir={folder}"]
        run_choose(cells, master, make, launcher, planner or FormulaPlanner())
