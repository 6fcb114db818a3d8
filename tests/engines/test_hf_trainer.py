"""The Trainer beside our loop: in one sweep, and never something else than was asked."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distexp.config import ConfigError
from distexp.runs.record import RunRecord
from tests.helpers.runs import HELPERS, REPOSITORY, resolve_cell, run_distexp

SHORT = ("dataset.train_size=32", "dataset.eval_size=8", "train.num_epochs=1", "train.measure_after_step=1")
REFUSED = {  # what the Trainer would leave out, and what to do instead
    "sharding=no_shard cluster.workers_per_node=2": "choose strategy=ddp, or engine=native",
    "sharding=hybrid_shard fsdp.replicas=2 cluster.workers_per_node=2": "shards nothing here",
    "sharding=full_shard fsdp.forward_prefetch=2": "fsdp.forward_prefetch=2 is nothing that accelerate",
    "sharding=full_shard fsdp.backward_prefetch=0": "leave it at 1, or choose engine=native",
    "strategy=ddp strategy.name=mine": "engine=hf_trainer distributes by single, ddp, fsdp, deepspeed, not by",
    "strategy=ddp train.checkpoint_every=5": "train.checkpoint_every=5 is for our own loop: leave it out",
    "strategy=ddp engine._target_=os.system": "trusted_packages=[os]",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_it_cannot_do_is_refused_before_anything_starts(line: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        resolve_cell("engine=hf_trainer", "cluster.device=cpu", *line.split())
    assert REFUSED[line] in str(refusal.value)


@pytest.mark.parametrize("line", ["strategy=single", "strategy=fsdp", "sharding=hybrid_shard", "zero_stage=3"])
def test_what_it_can_do_is_accepted(line: str) -> None:
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
    assert "ddp by hf_trainer" in done.stdout


@pytest.mark.slow
def test_a_trainer_that_wraps_something_else_fails(tmp_path: Path) -> None:
    """As it does on a CPU by itself: plain DDP where FSDP was asked for."""
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
        "what was built is not what was asked for: wrapper is 'DistributedDataParallel', "
        "not 'fully_shard(reshard_after_forward=True)'"
    )
    assert record.metrics.train_loss is None
