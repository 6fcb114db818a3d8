"""What a terminal and a panel say of a run's evaluation."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from distexp.console.screen import Live, Tail, summary
from tests.helpers.records import record

EVENTS = (
    {"phase": "train", "total_steps": 4},
    {"epoch": 1, "train_loss": 2.0, "eval_loss": 1.5, "eval_accuracy": 0.25, "eval_top5_accuracy": 0.75},
    {"measured_samples": 12},
    {"phase": "eval"},
    {"exact_match": 8.125, "f1": 9.0},
    {"phase": "done"},
)


def test_a_live_screen_tells_every_kind_of_event(tmp_path: Path) -> None:
    (tmp_path / "events").write_text("".join(json.dumps(event) + "\n" for event in EVENTS))
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=100, color_system=None)
    progress = Progress(console=console, disable=True)
    task = progress.add_task("start", total=None)
    live = Live(console, Tail(tmp_path / "events"), Tail(tmp_path / "none"), Tail(tmp_path / "none"), progress, task)
    live.refresh()
    assert "epoch 1: train loss 2.0000, eval loss 1.5000, accuracy 25.0%, top-5 75.0%" in shown.getvalue()
    assert "answers: exact match 8.1%, F1 9.0%" in shown.getvalue()
    assert progress.tasks[0].description == "done"


def test_a_panel_has_the_scores_where_there_are_any() -> None:
    run = record(0)
    run.run.duration_s = 4.0
    assert not {"answers", "eval top-5"} & {name for name, _ in summary(run)}
    run.metrics.exact_match, run.metrics.f1 = 53.8, 72.8
    run.metrics.eval_accuracies, run.metrics.eval_top5_accuracies = [0.2, 0.3], [0.7, 0.9]
    lines = dict(summary(run))
    assert lines["answers"] == "exact match 53.8%, F1 72.8%"
    assert lines["eval top-5"] == "70.0% -> 90.0%"


def test_a_panel_shortens_what_many_epochs_gave() -> None:
    run = record(0)
    run.run.duration_s = 4.0
    run.metrics.train_losses = run.metrics.eval_losses = [float(epoch) for epoch in range(1, 61)]
    assert dict(summary(run))["eval loss"] == "1.0000 -> 2.0000 -> ... -> 58.0000 -> 59.0000 -> 60.0000"
