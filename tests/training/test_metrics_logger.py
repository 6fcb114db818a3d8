"""The metrics of a training, from its batches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distexp.config import TrainConfig
from distexp.data.base import Batch, Sample
from distexp.data.images import collate_images
from distexp.data.shards import PaddedDataset, StepData
from distexp.data.targets import TargetTokens
from distexp.data.text import TextCollate
from distexp.distributed.context import Context
from distexp.runs.events import Events
from distexp.runs.metrics import Metrics
from distexp.training.metrics_logger import MetricsLogger
from distexp.training.schedule import StepPlan


def text_samples(*lengths: int) -> list[Sample]:
    return [{"input_ids": torch.ones(n, dtype=torch.long), "labels": torch.ones(n, dtype=torch.long)} for n in lengths]


def record(steps: Sequence[Sequence[Batch]], folder: Path) -> Metrics:
    """Return the metrics of a training with these micro-batches."""
    context = Context(0, 1, 0, 1, 1, torch.device("cpu"), folder)
    plan = StepPlan(TrainConfig(num_epochs=1, measure_after_step=0), len(steps))
    logger = MetricsLogger(plan, context, Events(folder, enabled=False))
    logger.start()
    logger.start_steps()
    for batches in steps:
        samples = sum(batch.num_samples for batch in batches)
        logger.record_step(
            StepData(list(batches), torch.tensor(1), samples, 0.25), torch.zeros(2), torch.tensor(1.0), 0.1
        )
    return logger.finish()


@pytest.mark.parametrize("target_logits", [False, True])
def test_the_padding_share_is_that_of_all_training_batches(target_logits: bool, tmp_path: Path) -> None:
    padded = TextCollate(0, 10)
    collate = TargetTokens(padded) if target_logits else padded
    padding_sample = PaddedDataset(text_samples(10))[1]
    steps = [
        [collate(text_samples(10, 10)), collate(text_samples(5, 2))],  # 13 of 40 positions
        [collate([*text_samples(10), padding_sample])],  # 10 of 20
    ]
    assert record(steps, tmp_path).padding_share == pytest.approx(23 / 60)


def test_the_padding_share_of_a_collate_function_that_counts_no_tokens_is_unknown(tmp_path: Path) -> None:
    batch = replace(TextCollate(0, 10)(text_samples(5)), num_tokens=0)
    assert record([[batch]], tmp_path).padding_share is None


def test_the_speed_of_a_line_counts_the_samples_of_its_steps(tmp_path: Path) -> None:
    collate = TextCollate(0, 10)
    metrics = record([[collate(text_samples(*[5] * count))] for count in (3, 4, 5, 12)], tmp_path)
    assert metrics.data_wait_s == 1.0, "the sum over the steps"
    (line,) = (json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert line["samples_per_second"] * line["step_time_s"] == pytest.approx(6)


def test_images_have_no_padding_share(tmp_path: Path) -> None:
    image = {"images": torch.zeros(3, 2, 2, dtype=torch.uint8), "labels": torch.tensor(0)}
    assert record([[collate_images([image])]], tmp_path).padding_share is None
