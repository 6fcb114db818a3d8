"""The metrics of a training, from its batches."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distexp.config import MeasureConfig, TrainConfig
from distexp.data.base import Batch, Sample, TargetTokens, measure_workload
from distexp.data.images import collate_images
from distexp.data.loader import PaddedDataset, StepData
from distexp.data.text import TextCollate
from distexp.distributed.context import Context
from distexp.measure.profiling.profiler import ProfileResult, StepProfiler
from distexp.runs.events import Events
from distexp.runs.metrics import Metrics
from distexp.training.inputs import StepPlan
from distexp.training.metrics_logger import DivergedError, MetricsLogger
from distexp.training.watchers import build_watchers


def text_samples(*lengths: int) -> list[Sample]:
    return [{"input_ids": torch.ones(n, dtype=torch.long), "labels": torch.ones(n, dtype=torch.long)} for n in lengths]


def record(
    steps: Sequence[Sequence[Batch]], folder: Path, breakdown: dict[str, float] | None = None, warmup: int = 0
) -> Metrics:
    """Return the metrics of a training with these micro-batches, and the parts of a profiled step."""
    context = Context(0, 1, 0, 1, 1, torch.device("cpu"), folder)
    plan = StepPlan(TrainConfig(num_epochs=1, measure_after_step=warmup), len(steps))
    watchers = build_watchers(plan, MeasureConfig(), context)
    logger = MetricsLogger(plan, context, Events(folder, enabled=False), watchers)
    logger.start()
    logger.start_steps()
    for batches in steps:
        samples = sum(batch.num_samples for batch in batches)
        logger.record_step(
            StepData(list(batches), torch.tensor(1), samples, 0.25, measure_workload(batches)),
            torch.zeros(2),
            torch.tensor(1.0),
            0.1,
        )
    if breakdown is not None:
        (profiler,) = (watcher for watcher in watchers if isinstance(watcher, StepProfiler))
        profiler.finish = lambda: ProfileResult({}, [breakdown])  # type: ignore[method-assign]
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


def test_the_last_line_has_the_speed_of_its_own_steps(tmp_path: Path) -> None:
    """Ten steps of 5 samples are the first line, and one step of 40 samples is the last one."""
    collate = TextCollate(0, 10)
    record([[collate(text_samples(*[5] * count))] for count in (*[5] * 10, 40)], tmp_path)
    first, last = (json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert first["samples_per_second"] * first["step_time_s"] == pytest.approx(5)
    assert last["samples_per_second"] * last["step_time_s"] == pytest.approx(40)


def test_images_have_no_padding_share(tmp_path: Path) -> None:
    image = {"images": torch.zeros(3, 2, 2, dtype=torch.uint8), "labels": torch.tensor(0)}
    assert record([[collate_images([image])]], tmp_path).padding_share is None


def test_a_few_more_labels_do_not_hide_the_overhead_of_the_profiler(tmp_path: Path) -> None:
    """With ``train.logits=targets``, the labels of a step vary, and are few in relation to its tokens."""
    collate = TargetTokens(TextCollate(0, None))
    steps = [[collate([_sample(20_000, labels)])] for labels in (100, 200, 400)]
    parts = dict.fromkeys(("host_ms", "waiting_ms", "data_wait_ms", "cpu_busy_ms", "optimizer_ms"), 0.0)
    found = record(steps, tmp_path, {**parts, "step_ms": 1e6, "launch_idle_ms": 1e6}).step_breakdown
    assert found is not None
    assert not found[0]["includes_overhead"]


def _sample(length: int, labels: int) -> Sample:
    targets = torch.full((length,), -100)
    targets[-labels:] = 1
    return {"input_ids": torch.ones(length, dtype=torch.long), "labels": targets}


@pytest.mark.parametrize(("lengths", "includes_overhead"), [((3, 10, 10), False), ((3, 10, 8), True)])
def test_the_overhead_of_the_profiler_is_known_if_the_steps_are_equal(
    lengths: tuple[int, ...], includes_overhead: bool, tmp_path: Path
) -> None:
    """The first step is the warm-up, whose size does not matter. The collate function pads to the longest text."""
    steps = [[TextCollate(0, None)(text_samples(length, length))] for length in lengths]
    parts = {
        "step_ms": 1e6 + 400,
        "launch_idle_ms": 1e6,
        "host_ms": 0.0,
        "waiting_ms": 0.0,
        "data_wait_ms": 400.0,
        "cpu_busy_ms": 0.0,
        "optimizer_ms": 0.0,
    }
    found = record(steps, tmp_path, parts, warmup=1).step_breakdown
    assert found is not None
    assert found[0]["includes_overhead"] == includes_overhead
    assert (found[0]["step_ms"] == 1e6 + 400) == includes_overhead
    expected = 400 if includes_overhead else 250
    assert found[0]["data_wait_ms"] == expected, "the measured steps wait 250 ms for their data"


@pytest.mark.parametrize(
    ("stops", "scales_loss", "values", "error"),
    [
        (True, False, [(math.nan, 1)], "the loss of step 1 is nan: no update was made yet, so check the weights and"),
        (True, False, [(1, 1), (1, math.nan), (1, 1)], "the gradient norm of step 2 is nan: lower train.learning_rate"),
        (True, False, [(1, 1), (1, 1), (1, math.inf)], "the gradient norm of step 3 is inf: lower train.learning_rate"),
        (True, False, [(1, 1), (math.nan, math.nan), (1, 1)], "the loss of step 2 is nan: lower"),
        (False, False, [(1, 1), (math.nan, math.nan), (1, math.inf)], None),
        (True, True, [(1, math.inf), (1, math.nan), (1, 1)], None),
        (True, True, [(1, math.inf), (1, 1), (math.nan, 1)], "the loss of step 3 is nan: lower"),
    ],
)
def test_a_loss_or_a_gradient_that_is_not_finite_stops_the_run(
    stops: bool, scales_loss: bool, values: list[tuple[float, float]], error: str | None, tmp_path: Path
) -> None:
    """The values are loss and gradient norm of each step. fp16 scales the loss, and skips infinite gradients."""
    plan = StepPlan(TrainConfig(num_epochs=1, on_nan="stop" if stops else "record"), len(values))
    context = Context(0, 1, 0, 1, 1, torch.device("cpu"), tmp_path)
    logger = MetricsLogger(plan, context, Events(tmp_path, enabled=False), [], scales_loss=scales_loss)
    logger.start()
    logger.start_steps()
    batch = TextCollate(0, 10)(text_samples(5))
    step = StepData([batch], torch.tensor(1), 1, 0.25, measure_workload([batch]))
    with pytest.raises(DivergedError, match=error) if error else nullcontext():
        for loss, norm in values:
            logger.record_step(step, torch.tensor([loss, 0.0]), torch.tensor(norm), 0.1)


def test_the_logged_learning_rate_is_that_of_the_optimizer(tmp_path: Path) -> None:
    context = Context(0, 1, 0, 1, 1, torch.device("cpu"), tmp_path)
    plan = StepPlan(TrainConfig(num_epochs=1, log_every=1), 1)
    logger = MetricsLogger(plan, context, Events(tmp_path, enabled=False), [])
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    logger.follow(model, optimizer)
    logger.start()
    logger.start_steps()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.5  # as the Trainer of transformers does after the update
    batch = TextCollate(0, 10)(text_samples(5))
    step = StepData([batch], torch.tensor(1), 1, 0.25, measure_workload([batch]))
    planned = 0.1  # A strategy that ignores it must not log it.
    logger.record_step(step, torch.zeros(2), torch.tensor(1.0), planned)
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["learning_rate"] == 0.25
