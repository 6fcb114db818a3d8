"""Data without targets or without samples is named as the cause, instead of a loss that is not a number."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distexp.config import ConfigError
from distexp.distributed.context import Context
from distexp.runs.events import Events
from distexp.runs.record import RunRecord
from distexp.worker import rank
from tests.helpers.runs import make_spec

pytestmark = pytest.mark.slow

SMALL = (
    "model=gpt_tiny", "strategy=single", "cluster.workers_per_node=1", "cluster.device=cpu", "trusted_packages=[tests]",
    "dataset=synthetic", "dataset.train_size=8", "dataset.eval_size=4", "dataset.max_length=16",
    "train.micro_batch_size=1", "train.gradient_accumulation_steps=1", "train.num_epochs=1",
    "train.measure_after_step=1",
)  # fmt: skip


def run(folder: Path, name: str, *overrides: str) -> RunRecord:
    spec = make_spec(*SMALL, f"dataset._target_=tests.helpers.untargeted.{name}", *overrides)
    spec.write(folder)
    return rank.train(spec, Context(0, 1, 0, 1, 1, torch.device("cpu"), folder), Events(folder, enabled=True))


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("training", (), r"step \d has no target: .* or raise train.micro_batch_size"),
        ("training", ("train.log_every=8",), r"step [1-7] has no target: all its labels are -100"),
        ("evaluation", (), "the evaluation set has no target: .* or set train.evaluate=false"),
        ("no_training", (), r"the training set has no sample \(3 were left out: they have no answer\): correct the "),
        ("no_training", ("dataset.packing=true",), "the training set has no sample"),
        ("no_evaluation", (), "the evaluation set has no sample: correct the data, or set train.evaluate=false"),
    ],
)
def test_the_cause_is_named(
    name: str, overrides: tuple[str, ...], message: str, one_rank_group: None, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, name, *overrides)


@pytest.mark.parametrize("name", ["evaluation", "no_evaluation"])
def test_a_run_that_does_not_evaluate_needs_no_evaluation_set(name: str, one_rank_group: None, tmp_path: Path) -> None:
    record = run(tmp_path, name, "train.evaluate=false")
    assert len(record.metrics.train_losses) == 1
