"""A training whose gradients are all zero prints a warning, because its speed looks like that of any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distexp.distributed.context import Context
from distexp.runs.events import Events
from distexp.worker import rank
from tests.helpers.runs import make_spec

SMALL = (
    "model=gpt_tiny", "strategy=single", "cluster.workers_per_node=1", "cluster.device=cpu", "trusted_packages=[tests]",
    "dataset=synthetic", "dataset.train_size=8", "dataset.max_length=16", "train.evaluate=false", "train.log_every=1",
    "train.micro_batch_size=1", "train.gradient_accumulation_steps=1", "train.num_epochs=1",
)  # fmt: skip
DETACHED = "model._target_=tests.helpers.detached_gpt.build"


@pytest.mark.parametrize(("overrides", "warnings"), [((DETACHED,), 1), ((), 0)])
def test_a_model_that_learns_nothing_prints_one_warning(
    overrides: tuple[str, ...], warnings: int, one_rank_group: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = make_spec(*SMALL, *overrides)
    spec.write(tmp_path)
    rank.train(spec, Context(0, 1, 0, 1, 1, torch.device("cpu"), tmp_path), Events(tmp_path, enabled=True))
    found = capsys.readouterr().out
    assert found.count("warning: the gradient norm of step 1 is 0 with a loss of") == warnings
    assert found.count("warning: the gradient norm") == warnings
