"""Trackers for TensorBoard, Weights & Biases, MLflow and trackio."""

import json
import os
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from distexp.config.fields import flatten
from distexp.config.overrides import shell_quote
from distexp.runs.record import RunRecord, RunSpec
from distexp.runs.run_dir import DS_CONFIG, EVENTS, MEMORY, METRICS, RECORD, SPEC, TENSORBOARD, TRACKER_END, TRACKER_LOG
from distexp.system.processes import end_tree, start_module
from distexp.system.typed_values import cpu_peak_mib, device_values, gpu_peaks_mib, mean_or_none

# Interface of trackers, the values that they receive, and start and end of the tracker process.


ARTIFACTS = (RECORD, SPEC, METRICS, EVENTS, DS_CONFIG, f"{MEMORY}/*.csv")  # files that a tracker stores
FINISH_TIMEOUT_S = 60.0  # time for a tracker to write summary and files after the run


class Tracker(Protocol):
    """Connection to one tracking library; its constructor takes (spec, directory) and starts a run there."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a step."""

    def finish(self, record: RunRecord, summary: Mapping[str, float], files: Iterable[Path]) -> list[str]:
        """Log summary and files, and end the run; return messages for the user, such as how to view it."""


def step_values(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a line of metrics.jsonl, with the prefix that trackers group by."""
    return {f"train/{name}": value for name, value in line.items() if name != "step" and value is not None}


def evaluation_values(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a line of events.jsonl; empty unless it is the evaluation of an epoch."""
    found = {name: line.get(f"eval_{name}") for name in ("loss", "accuracy")}
    return {f"eval/{name}": value for name, value in found.items() if value is not None}


def summary_values(record: RunRecord) -> dict[str, float]:
    """Return the metrics of a whole run; some have the names that the workshop's callbacks use."""
    flat = {name: value for name, value in asdict(record.metrics).items() if isinstance(value, int | float)}
    flat |= {f"step_time_s/{name}": value for name, value in (record.metrics.step_time_s or {}).items()}
    memory, utilization = record.memory, record.utilization
    named = {
        "avg_gpu_util_%": mean_or_none(device_values(utilization["gpu"], "average_pct")),
        "avg_mem_alloc_MB": mean_or_none(device_values(memory["torch"], "average_allocated_mib")),
        "peak_mem_alloc_MB": max(device_values(memory["torch"], "peak_allocated_mib"), default=None),
        "peak_gpu_mem_MB": max(gpu_peaks_mib(memory), default=None),
        "peak_cpu_mem_MB": cpu_peak_mib(memory),
        "train/samples_per_second_mean": record.metrics.train_samples_per_second,
    }
    return flat | {name: value for name, value in named.items() if value is not None}


def flat_config(spec: RunSpec) -> dict[str, Any]:
    """Return the resolved configuration as ``section.key``; it contains no secrets."""
    return dict(flatten(asdict(spec.config)))


def run_name(spec: RunSpec) -> str:
    """Return the display name of a run: name, number and overrides."""
    return " ".join([f"{spec.run.name}/{spec.run.number}", *spec.run.overrides])


@contextmanager
def tracked(spec: RunSpec, directory: Path) -> Iterator[list[str]]:
    """Run the tracker of a run during a ``with`` block; never raise. The block must write the record.

    The list has the messages of the tracker for the user when the block has ended.
    """
    messages: list[str] = []
    name = spec.config.tracker.name
    if spec.config.tracker._target_ is None:
        yield messages
        return
    log = directory / TRACKER_LOG
    log.parent.mkdir(parents=True, exist_ok=True)
    (directory / TRACKER_END).unlink(missing_ok=True)
    with log.open("w") as output:
        process = start_module("distexp.tracking", str(directory), env=os.environ, output=output)
    try:
        yield messages
    finally:
        with suppress(OSError):  # On a full disk, the tracker is stopped after the time limit.
            (directory / TRACKER_END).touch()
        try:
            process.wait(FINISH_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            end_tree(process, 1.0)
            messages.append(f"warning: tracker={name} did not finish within {FINISH_TIMEOUT_S:g} s and was stopped")
        lines = log.read_text(errors="replace").splitlines()
        messages += [line for line in lines if line.startswith(("warning:", f"{name}:"))]
        if not messages:
            messages.append(f"warning: tracker={name} ended early ({lines[-1] if lines else 'no output'}): see {log}")


MAX_PARAM_LENGTH = 500  # characters that every store of MLflow accepts


class TensorBoard:
    """Tracker that writes event files: metrics as scalars, the configuration as text."""

    def __init__(self, spec: RunSpec, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.folder = directory / TENSORBOARD
        self.writer = SummaryWriter(str(self.folder), flush_secs=10)
        text = json.dumps(flat_config(spec), indent=2, default=str)
        self.writer.add_text("run", run_name(spec))
        self.writer.add_text("config", f"```json\n{text}\n```")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a step."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def finish(self, record: RunRecord, summary: Mapping[str, float], files: Iterable[Path]) -> list[str]:
        """Log the summary as ``summary/`` at step 0; files stay in the run directory."""
        self.log(0, {f"summary/{name}": value for name, value in summary.items()})
        self.writer.add_text("status", record.status)
        self.writer.close()
        return [f"tensorboard --logdir {shell_quote(str(self.folder))}"]


class Wandb:
    """Tracker that logs to a wandb run in the run directory; wandb reads the key from WANDB_API_KEY."""

    def __init__(self, spec: RunSpec, directory: Path) -> None:
        import wandb

        options = spec.config.tracker
        self.online = options.online
        self.run = wandb.init(
            project=options.project,
            name=run_name(spec)[:128],
            group=spec.run.name,
            dir=directory,
            mode="online" if options.online else "offline",
            config=flat_config(spec),
            settings=wandb.Settings(silent=True, console="off", disable_git=True, x_disable_stats=True),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a step."""
        self.run.log(dict(values), step=step)

    def finish(self, record: RunRecord, summary: Mapping[str, float], files: Iterable[Path]) -> list[str]:
        """Log summary and files, and end the run; return its URL, or the command that uploads an offline run."""
        import wandb

        self.run.summary.update({**summary, "status": record.status})
        artifact = wandb.Artifact(f"run-{record.run.id}", type="distexp-run")
        for path in files:
            artifact.add_file(str(path), name=path.name)
        self.run.log_artifact(artifact)
        folder, address = Path(self.run.dir).parent, self.run.url
        self.run.finish(exit_code=0 if record.status == "completed" else 1)
        return [f"wandb: {address}"] if self.online else [f"wandb sync {shell_quote(str(folder))}"]


class MLflow:
    """Tracker that logs to a run in the MLflow experiment ``tracker.project``."""

    def __init__(self, spec: RunSpec, directory: Path) -> None:
        # MLflow refuses a local folder without this variable, but a cluster may have no server.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.tracking import MlflowClient

        options = spec.config.tracker
        self.uri = options.uri or f"file://{Path('mlruns').absolute()}"
        self.client = MlflowClient(self.uri)
        found = self.client.get_experiment_by_name(options.project)
        experiment = found.experiment_id if found else self.client.create_experiment(options.project)
        self.run_id = self.client.create_run(experiment, run_name=run_name(spec)[:250]).info.run_id
        for key, value in flat_config(spec).items():
            self.client.log_param(self.run_id, key, str(value)[:MAX_PARAM_LENGTH])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a step."""
        now = int(time.time() * 1000)
        for name, value in values.items():
            self.client.log_metric(self.run_id, name.replace("%", "pct"), value, timestamp=now, step=step)

    def finish(self, record: RunRecord, summary: Mapping[str, float], files: Iterable[Path]) -> list[str]:
        """Log summary, status and files, and end the run."""
        self.log(0, {f"summary/{name}": value for name, value in summary.items()})
        self.client.set_tag(self.run_id, "distexp.status", record.status)
        for path in files:
            self.client.log_artifact(self.run_id, str(path))
        self.client.set_terminated(self.run_id, "FINISHED" if record.status == "completed" else "FAILED")
        return [f"mlflow ui --backend-store-uri {shell_quote(self.uri)}"]


class Trackio:
    """Tracker that logs to a run in trackio's local database."""

    def __init__(self, spec: RunSpec, directory: Path) -> None:
        import trackio

        self.project, self.step = spec.config.tracker.project, 0
        config = json.loads(json.dumps(flat_config(spec), default=str))
        # Other runs may have the same name and number, so the run id is added.
        name = f"{run_name(spec)[:100]} {spec.run.id}"
        options = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}  # distexp measures both
        self.run = trackio.init(self.project, name=name, group=spec.run.name, config=config, **options)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a step."""
        self.step = step
        self.run.log(dict(values), step=step)

    def finish(self, record: RunRecord, summary: Mapping[str, float], files: Iterable[Path]) -> list[str]:
        """Log the summary at the last step, and end the run; files stay in the run directory."""
        status = {"summary/completed": float(record.status == "completed")}
        self.log(self.step, {f"summary/{name}": value for name, value in summary.items()} | status)
        self.run.finish()
        return [f"trackio show --project {shell_quote(self.project)}"]
