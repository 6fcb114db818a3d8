"""A training that was interrupted is the same training: losses, norms, weights and records, for every strategy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from distexp.checkpoints import folder as disk
from distexp.runs.record import RunRecord
from tests.helpers.grid import Cells, Runs, lines, once_each, run_grid
from tests.helpers.runs import HELPERS

SCRIPT = HELPERS / "interrupted_runs.py"
COMMON = (
    "model=gpt_tiny",
    "model.dropout=0.1",
    "train.max_steps=9",
    "train.measure_after_step=1",
    "train.checkpoint_every=3",
    "dataset.train_size=90",  # 4 steps an epoch, the last with fewer samples: step 6 is in mid-epoch
    "dataset.eval_size=20",
    "cluster.cpus_per_worker=1",
)
CELLS: dict[tuple[str, int], dict[str, tuple[str, ...]]] = {
    ("torch", 1): {"single": ("strategy=single",), "sgd": ("strategy=single", "train.optimizer=sgd")},
    ("torch", 2): {
        "ddp": ("strategy=ddp",),
        "full_shard": ("sharding=full_shard",),
        "full_shard_offload": ("sharding=full_shard", "offload=true"),
        "hybrid_shard": ("sharding=hybrid_shard", "fsdp.replicas=2"),
        "shard_grad_op_bf16": ("sharding=shard_grad_op", "precision=bf16"),
        "tied": ("model=bloom_tiny", "model.dropout=null", "sharding=full_shard"),
        "plain": ("sharding=full_shard", "model.dropout=0"),  # what three workers go on from
        "unwatched": ("strategy=ddp", "train.checkpoint_every=null"),
    },
    ("deepspeed", 2): {
        **{f"zero{stage}": (f"zero_stage={stage}",) for stage in (0, 1, 2, 3)},
        "zero3_offload": ("zero_stage=3", "offload=true"),
        "zero0_bf16": ("zero_stage=0", "precision=bf16"),
        "zero2_bf16": ("zero_stage=2", "precision=bf16"),
    },
}
NAMES = [(library, workers, name) for (library, workers), cells in CELLS.items() for name in cells]
INTERRUPTED = [
    pytest.param(*cell, id=cell[2], marks=() if cell[1] == 1 else pytest.mark.slow)
    for cell in NAMES
    if cell[2] != "unwatched"
]


def run_cells(folder: Path, workers: int, cells: Cells) -> Path:
    return run_grid(SCRIPT, folder, workers, {name: (*COMMON, *overrides) for name, overrides in cells.items()})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return once_each(
        tmp_path_factory, lambda folder, library, workers: run_cells(folder, workers, CELLS[library, workers])
    )


def assert_same_training(one: Path, other: Path, rel: float = 1e-6) -> None:
    expected, actual = lines(one), lines(other)
    assert [line["step"] for line in actual] == list(range(1, 10))
    assert [line["step"] for line in expected] == list(range(1, 10))
    for theirs, ours in zip(expected, actual, strict=True):
        for key in ("loss", "grad_norm", "learning_rate", "epoch"):
            assert ours[key] == pytest.approx(theirs[key], rel=rel), (key, ours["step"])


@pytest.mark.parametrize(("library", "workers", "name"), INTERRUPTED)
def test_an_interrupted_training_is_the_same_training(library: str, workers: int, name: str, runs: Runs) -> None:
    folder = runs(library, workers) / name
    assert_same_training(folder / "whole.jsonl", folder / "metrics.jsonl")
    whole, gone_on = (RunRecord.read(folder / file).metrics for file in ("whole.json", "record.json"))
    assert len(whole.eval_losses) == 3
    for key in ("train_losses", "eval_losses", "train_loss", "eval_loss"):
        assert getattr(gone_on, key) == pytest.approx(getattr(whole, key), rel=1e-6), key
    assert gone_on.train_samples_per_second is not None, "two of the three steps were measured"
    events = lines(folder / "events.jsonl")
    assert [event["resumed_from_step"] for event in events if "resumed_from_step" in event] == [6]
    assert [disk.step_of(path) for path in disk.list_checkpoints(folder)] == [9, 6], "the newest two are kept"


@pytest.mark.slow
def test_writing_checkpoints_changes_nothing(runs: Runs) -> None:
    folder = runs("torch", 2)
    assert_same_training(folder / "unwatched" / "metrics.jsonl", folder / "ddp" / "whole.jsonl")
    assert not (folder / "unwatched" / "checkpoints").exists()


@pytest.mark.slow
def test_chance_matters_here(runs: Runs) -> None:
    """Without dropout the first loss is another one: what goes on above goes on with its chance."""
    folder = runs("torch", 2)
    with_dropout, without = (lines(folder / name / "whole.jsonl")[0]["loss"] for name in ("full_shard", "plain"))
    assert with_dropout != pytest.approx(without, rel=1e-4)


@pytest.mark.slow
def test_three_workers_go_on_from_what_two_wrote(runs: Runs, tmp_path: Path) -> None:
    """By ``train.resume``: in a run of its own, from the newest checkpoint that is whole."""
    theirs = runs("torch", 2) / "plain"
    source = tmp_path / "source"
    shutil.copytree(theirs, source)
    (shard, *_) = sorted(disk.checkpoint_dir(source, 9).glob("engine/*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    cell = ("sharding=full_shard", "model.dropout=0", f"train.resume={source}", "train.checkpoint_every=null")
    other = (*cell, "train.gradient_accumulation_steps=1")
    folder = run_cells(tmp_path / "cells", 3, {"three": cell, "other": other})
    assert_same_training(theirs / "whole.jsonl", folder / "three" / "metrics.jsonl", rel=1e-5)
    (event,) = [event for event in lines(folder / "three" / "events.jsonl") if "resumed_from_step" in event]
    assert event["resumed_from_step"] == 6, "step 9 is rotten"
    ours, record = (RunRecord.read(path / "record.json") for path in (folder / "three", theirs))
    assert ours.built is not None
    assert ours.built.mesh == [1, 3]
    assert ours.metrics.eval_losses == pytest.approx(record.metrics.eval_losses, rel=1e-5)
    refused = (folder / "other" / "refused.txt").read_text()
    assert "global_batch is 24 instead of 12; steps_per_epoch is 4 instead of 8" in refused
