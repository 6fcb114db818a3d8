"""A search by two workers of which one has little memory, from the command line to the record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distexp.runs.record import RunRecord
from tests.helpers.runs import run_distexp

CUSTOM_STRATEGY = """
import torch
from distexp.strategies.ddp import DDP

class SmallMemory(DDP):
    def setup(self, blueprint, config, context):
        model = super().setup(blueprint, config, context)
        forward_backward = model.forward_backward

        def limited(batch, **arguments):
            if context.rank == 1 and len(batch.labels) > config.strategy.options["samples"]:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return forward_backward(batch, **arguments)

        model.forward_backward = limited
        return model
"""
STRATEGY = "# @package _global_\nstrategy: {name: mine, _target_: small_memory.SmallMemory, options: {samples: 2}}\n"
RUNS = (
    *("--config-dir", "conf", "strategy=mine", "trusted_packages=[small_memory]", "cluster.device=cpu"),
    *("train.global_batch_size=8", "train.max_steps=3", "train.log_every=1", "model.dropout=0.1"),
    *("dataset.train_size=32", "dataset.eval_size=4", "cluster.workers_per_node=2", "measure.enabled=false"),
)


@pytest.mark.slow
def test_the_workers_agree_and_train_as_with_the_found_size(tmp_path: Path) -> None:
    (tmp_path / "conf" / "strategy").mkdir(parents=True)
    (tmp_path / "conf" / "strategy" / "mine.yaml").write_text(STRATEGY)
    (tmp_path / "small_memory.py").write_text(CUSTOM_STRATEGY)
    cells = [["train.micro_batch_size=auto"], ["train.micro_batch_size=1"], ["train.micro_batch_size=2"]]
    nothing_fits = ["train.micro_batch_size=auto", "strategy.options.samples=0"]
    done = run_distexp("--multirun", *RUNS, f"sweep.cells={json.dumps([*cells, nothing_fits])}", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    folders = sorted(path.parent for path in tmp_path.glob("multirun_outputs/*/*/*/record.json"))
    found, *_, failed = [RunRecord.read(folder / "record.json") for folder in folders]
    search = found.metrics.micro_batch_search
    assert search is not None
    outcomes = {candidate["micro_batch_size"]: candidate["outcome"] for candidate in search["candidates"]}
    assert outcomes == {1: "fits", 2: "fits", 4: "oom"}
    size = found.config["train"]["micro_batch_size"]
    assert found.config["train"]["gradient_accumulation_steps"] == 4 // size
    assert f"micro-batch: {size} (of 1, 2; 4 ran out of memory; " in done.stdout
    curves = [
        [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in folders[:3]
    ]
    assert curves[0] == curves[size], "to the digit, with dropout"
    assert failed.status == "oom_host", "the device is the CPU"
    assert failed.error is not None
    assert "a micro-batch of 1 sample needs more memory than there is" in failed.error.message
    assert failed.config["train"]["micro_batch_size"] == "auto"
