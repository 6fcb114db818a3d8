"""A training whose gradients are all zero prints a warning, and one whose gradients are NaN stops.

Their speed and their losses look like those of any other.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distexp.distributed.context import Context
from distexp.runs.events import Events
from distexp.runs.record import RunRecord
from distexp.training.metrics_logger import DivergedError
from distexp.worker import rank
from tests.helpers.runs import make_spec, run_distexp

SMALL = (
    "model=gpt_tiny", "cluster.workers_per_node=1", "cluster.device=cpu", "trusted_packages=[tests]",
    "dataset=synthetic", "dataset.train_size=8", "dataset.max_length=16", "train.evaluate=false", "train.log_every=1",
    "train.micro_batch_size=1", "train.gradient_accumulation_steps=1", "train.num_epochs=1",
)  # fmt: skip
DETACHED = "model._target_=tests.helpers.detached_gpt.build"
NAN = f"{DETACHED}_nan"


@pytest.mark.parametrize(("overrides", "warnings"), [((DETACHED,), 1), ((), 0)])
def test_a_model_that_learns_nothing_prints_one_warning(
    overrides: tuple[str, ...], warnings: int, one_rank_group: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = make_spec(*SMALL, "strategy=single", *overrides)
    spec.write(tmp_path)
    rank.train(spec, Context(0, 1, 0, 1, 1, torch.device("cpu"), tmp_path), Events(tmp_path, enabled=True))
    found = capsys.readouterr().out
    assert found.count("warning: the gradient norm of step 1 is 0 with a loss of") == warnings
    assert found.count("warning: the gradient norm") == warnings


def test_nan_gradients_stop_a_run(one_rank_group: None, tmp_path: Path) -> None:
    spec = make_spec(*SMALL, "strategy=single", NAN, "train.max_steps=1")
    spec.write(tmp_path)
    with pytest.raises(DivergedError, match="the gradient norm of step 1 is nan: no update"):
        rank.train(spec, Context(0, 1, 0, 1, 1, torch.device("cpu"), tmp_path), Events(tmp_path, enabled=True))


@pytest.mark.slow
def test_nan_gradients_stop_a_run_also_if_deepspeed_skips_the_step(tmp_path: Path) -> None:
    run_distexp(*SMALL, "zero_stage=3", NAN, "train.max_steps=2", cwd=tmp_path)
    (path,) = tmp_path.rglob("record.json")
    error = RunRecord.read(path).error
    assert error is not None
    assert error.type == "DivergedError"
    assert error.message.startswith("the gradient norm of step 1 is inf: no update was made yet, so check the weights")
