"""Tracker for TensorBoard."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from distexp.runs.record import RunRecord
from distexp.runs.run_dir import TENSORBOARD
from distexp.runs.spec import RunSpec
from distexp.tracking.base import flat_config, run_name


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
