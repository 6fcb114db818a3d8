"""Trackers for TensorBoard, Weights & Biases and MLflow."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from distexp.runs.record import RunRecord
from distexp.runs.run_dir import TENSORBOARD
from distexp.runs.spec import RunSpec
from distexp.tracking.base import flat_config, run_name

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
        return [f"tensorboard --logdir {self.folder}"]


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
        return [f"wandb: {address}"] if self.online else [f"wandb sync {folder}"]


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
        return [f"mlflow ui --backend-store-uri {self.uri}"]
