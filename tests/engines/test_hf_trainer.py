"""engine=hf_trainer: it refuses what it does not support, and trains as the native engine does."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from distexp.config import ConfigError
from distexp.runs.record import RunRecord
from distexp.strategies.ddp import DDP
from tests.helpers.runs import HELPERS, REPOSITORY, resolve_cell, run_distexp

SHORT = ("dataset.train_size=32", "dataset.eval_size=8", "train.num_epochs=1", "train.measure_after_step=1")
REFUSED = {  # overrides: a part of the message
    "sharding=no_shard cluster.workers_per_node=2": "choose strategy=ddp, or engine=native",
    "sharding=hybrid_shard fsdp.replicas=2 cluster.workers_per_node=2": "shards nothing, and engine=hf_trainer does",
    "sharding=full_shard fsdp.forward_prefetch=2": "fsdp.forward_prefetch=2 is not supported by engine=hf_trainer",
    "sharding=full_shard fsdp.backward_prefetch=0": "use 1, or engine=native",
    "strategy=ddp strategy._target_=tests.engines.test_hf_trainer.CustomDDP strategy.name=custom": (
        "engine=hf_trainer does not support strategy=custom: choose engine=native"
    ),
    "strategy=ddp train.checkpoint_every=5": "train.checkpoint_every=5 is not supported by engine=hf_trainer",
    "strategy=ddp engine._target_=os.system": "trusted_packages=[os]",
}


class CustomDDP(DDP):
    """A strategy that may distribute the model in another way than its base class."""


@pytest.mark.parametrize("line", REFUSED)
def test_unsupported_settings_are_refused_before_the_run_starts(line: str) -> None:
    trusted = ("trusted_packages=[tests]",) if "tests." in line else ()
    with pytest.raises(ConfigError) as refusal:
        resolve_cell("engine=hf_trainer", "cluster.device=cpu", *trusted, *line.split())
    assert REFUSED[line] in str(refusal.value)


@pytest.mark.parametrize("line", ["strategy=single", "strategy=fsdp", "sharding=hybrid_shard", "zero_stage=3"])
def test_supported_settings_are_accepted(line: str) -> None:
    assert resolve_cell("engine=hf_trainer", "cluster.device=cpu", line).engine.name == "hf_trainer"


@pytest.mark.slow
def test_both_engines_in_one_sweep(tmp_path: Path) -> None:
    words = ("--multirun", "engine=native,hf_trainer", "strategy=single,ddp", *SHORT, "cluster.device=cpu")
    done = run_distexp(*words, cwd=tmp_path, env={"COLUMNS": "200"})
    assert done.returncode == 0, done.stdout + done.stderr
    records = {}
    for path in tmp_path.rglob("record.json"):
        record = RunRecord.read(path)
        assert record.status == "completed"
        assert record.built is not None
        records[record.built.engine, record.built.strategy] = record
        assert {entry.name for entry in path.parent.iterdir()} >= {"metrics.jsonl", "events.jsonl", "heartbeat"}
    assert len(records) == 4
    for strategy in ("single", "ddp"):
        ours, theirs = records["native", strategy], records["hf_trainer", strategy]
        assert ours.metrics.train_losses == pytest.approx(theirs.metrics.train_losses, rel=1e-5)
        assert ours.metrics.eval_losses == pytest.approx(theirs.metrics.eval_losses, rel=1e-5)
        assert theirs.metrics.train_samples_per_second is not None
        assert theirs.environment is not None
        assert theirs.environment.accelerate is not None
        assert theirs.memory["cpu"][0]["peak_mib"] > 0
    table = done.stdout[done.stdout.index("samples/s  ") :]
    for engine in ("native", "hf_trainer"):
        assert table.count(f"{engine} ") >= 2
    assert "ddp, hf_trainer" in done.stdout


def test_fsdp_refuses_a_model_without_blocks() -> None:
    from distexp.engines.hf_adapters import FSDPAdapter

    model: Any = SimpleNamespace(model=nn.Linear(2, 2), materialize=lambda _: None)
    config = resolve_cell("engine=hf_trainer", "strategy=fsdp", "cluster.device=cpu")
    message = (
        "strategy=fsdp with engine=hf_trainer needs a model with repeated blocks, which Linear lacks: "
        "set engine=native, or fsdp.wrap to class names of its modules"
    )
    with pytest.raises(ConfigError, match=message):
        FSDPAdapter(model, config, model)


@pytest.mark.slow
def test_a_run_fails_if_the_trainer_uses_another_wrapper(tmp_path: Path) -> None:
    """Without FSDPAdapter's help, accelerate uses DDP instead of FSDP on a CPU."""
    words = ("engine=hf_trainer", "strategy=fsdp", "cluster.workers_per_node=1", *SHORT, "cluster.device=cpu")
    own = ("dataset._target_=failing_trainer.unsharded", "trusted_packages=[failing_trainer]")
    path = os.pathsep.join([str(HELPERS), str(REPOSITORY)])
    done = run_distexp(*words, *own, cwd=tmp_path, env={"PYTHONPATH": path})
    assert done.returncode == 1
    (written,) = tmp_path.rglob("record.json")
    record = RunRecord.read(written)
    assert record.status == "failed"
    assert record.error is not None
    assert record.error.phase == "setup"
    assert record.error.message.startswith(
        "the model was not built as requested: wrapper is 'DistributedDataParallel', "
        "not 'fully_shard(reshard_after_forward=True)'"
    )
    assert record.metrics.train_loss is None
