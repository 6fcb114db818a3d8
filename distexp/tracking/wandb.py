"""Tracker for Weights & Biases; offline unless ``tracker.online=true``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from distexp.runs.record import RunRecord
from distexp.runs.spec import RunSpec
from distexp.tracking.base import flat_config, run_name


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
