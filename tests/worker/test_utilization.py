"""FLOPs and utilization in the record of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distexp.config import Config
from distexp.data.base import TaskData, Workload
from distexp.distributed.context import Context
from distexp.measure.flops import training_flops
from distexp.preflight.run import store_ceiling
from distexp.runs.events import Events
from distexp.runs.record import RunRecord
from distexp.training.build import load_data
from distexp.training.inputs import StepPlan
from distexp.training.metrics_logger import MetricsLogger
from distexp.worker import rank
from distexp.worker.rank import add_flops
from tests.helpers.records import record
from tests.helpers.runs import resolve_cell

CPU = torch.device("cpu")
WORKERS, SAMPLES, SPEED = 2, 10, 1e6
DONE = Workload(SAMPLES, 200, 4000, 50, SAMPLES, 640, 640 * 64, 640 * 64, 640)
PEAK, CEILING = 67.0, 50.0


@pytest.fixture
def config() -> Config:
    return resolve_cell("model=gpt_tiny", "dataset.max_length=64", "strategy=ddp", "cluster.device=cpu")


@pytest.fixture
def data(config: Config, tmp_path: Path) -> TaskData:
    return load_data(config, Context(0, 1, 0, 1, 1, CPU, tmp_path))


@pytest.fixture
def logger(config: Config, tmp_path: Path) -> MetricsLogger:
    """Return the logger of a finished training."""
    context = Context(0, WORKERS, 0, 1, WORKERS, CPU, tmp_path)
    logger = MetricsLogger(StepPlan(config.train, 1), context, Events(tmp_path, enabled=False), [])
    logger.measured_work, logger.counts.measured_samples = DONE, SAMPLES
    return logger


def test_utilization_is_that_of_the_datasheet_and_of_the_ceiling(
    config: Config, data: TaskData, logger: MetricsLogger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTEXP_CACHE", str(tmp_path))
    run = finished_run()
    add_flops(run, config, data, logger)
    flops, metrics = training_flops(config, data, DONE, CPU), run.metrics
    assert metrics.model_tflops_per_sample == pytest.approx(flops.model / SAMPLES / 1e12)
    assert metrics.executed_tflops_per_sample == pytest.approx(flops.executed / SAMPLES / 1e12)
    model, executed = (
        flops_of_run / SAMPLES / 1e12 * SPEED / WORKERS for flops_of_run in (flops.model, flops.executed)
    )
    assert (metrics.tflops_per_device, metrics.executed_tflops_per_device) == pytest.approx((model, executed))
    assert (metrics.mfu, metrics.hfu) == pytest.approx((model / PEAK, executed / PEAK))
    assert metrics.mfu_of_ceiling is metrics.hfu_of_ceiling is None
    store_ceiling(CEILING, CPU, "fp32")
    add_flops(run, config, data, logger)
    assert metrics.matrix_ceiling_tflops == CEILING
    assert (metrics.mfu_of_ceiling, metrics.hfu_of_ceiling) == pytest.approx((model / CEILING, executed / CEILING))


def test_a_model_that_cannot_be_counted_has_no_flops(
    config: Config,
    data: TaskData,
    logger: MetricsLogger,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def read_value(*_: object) -> None:
        torch.zeros(1, device="meta").item()

    monkeypatch.setattr(rank, "training_flops", read_value)
    run = finished_run()
    add_flops(run, config, data, logger)
    assert "note: the FLOPs of the model are not counted: RuntimeError: Tensor.item()" in capsys.readouterr().out
    assert run.metrics.model_tflops_per_sample is run.metrics.tflops_per_device is None


def test_no_error_of_a_custom_model_fails_a_finished_run(
    config: Config, data: TaskData, logger: MetricsLogger, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_attribute(*_: object) -> None:
        raise AttributeError("weight")

    monkeypatch.setattr(rank, "training_flops", read_attribute)
    run = finished_run()
    add_flops(run, config, data, logger)
    assert run.metrics.model_tflops_per_sample is None


def finished_run() -> RunRecord:
    """Return the record of a run on an H200, whose datasheet has a peak in fp32."""
    run = record(0, speed=SPEED, peak=1.0)
    assert run.environment is not None
    run.environment.gpu_name = "NVIDIA H200"
    return run
