"""train.evaluate=false: the same training without its evaluations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distexp.distributed.context import Context
from distexp.runs.events import Events
from distexp.runs.record import RunRecord
from distexp.system.files import read_entries
from distexp.worker import rank
from tests.helpers.runs import make_spec

pytestmark = pytest.mark.slow

IMAGES = ("model=resnet_tiny", "dataset.num_classes=10", "dataset.eval_size=8")

SMALL = (
    "model=gpt_tiny", "strategy=single", "cluster.workers_per_node=1", "cluster.device=cpu",
    "dataset=synthetic", "dataset.train_size=16", "dataset.eval_size=4", "dataset.max_length=16",
    "train.micro_batch_size=4", "train.gradient_accumulation_steps=1", "train.num_epochs=2",
    "train.measure_after_step=1",
)  # fmt: skip


def run(folder: Path, *overrides: str) -> RunRecord:
    folder.mkdir()
    spec = make_spec(*SMALL, *overrides)
    spec.write(folder)
    return rank.train(spec, Context(0, 1, 0, 1, 1, torch.device("cpu"), folder), Events(folder, enabled=True))


def test_a_training_without_evaluation_has_the_same_losses(one_rank_group: None, tmp_path: Path) -> None:
    usual, shorter = run(tmp_path / "a"), run(tmp_path / "b", "train.evaluate=false")
    assert shorter.metrics.train_losses == usual.metrics.train_losses
    assert len(usual.metrics.eval_losses) == len(usual.metrics.train_losses) == 2
    assert (shorter.metrics.eval_loss, shorter.metrics.eval_losses) == (None, [])
    events = list(read_entries(tmp_path / "b" / "events.jsonl"))
    assert "eval" not in {event.get("phase") for event in events}
    assert [event["epoch"] for event in events if "epoch" in event] == [1, 2]
    assert shorter.run.id != usual.run.id


def test_a_training_without_evaluation_has_the_same_accuracies(one_rank_group: None, tmp_path: Path) -> None:
    usual, shorter = run(tmp_path / "a", *IMAGES), run(tmp_path / "b", *IMAGES, "train.evaluate=false")
    assert len(usual.metrics.train_accuracies) == 2
    assert shorter.metrics.train_accuracies == usual.metrics.train_accuracies
    assert shorter.metrics.eval_accuracies == []
