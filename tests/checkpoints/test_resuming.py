"""A resumed training equals an uninterrupted one, with every strategy: losses, norms, weights and records."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from distexp.checkpoints import folder as disk
from distexp.runs.record import RunRecord
from tests.helpers.grid import FP16, Cells, Runs, read_lines, run_grid, run_once
from tests.helpers.runs import HELPERS

SCRIPT = HELPERS / "interrupted_runs.py"
GPT = ("model=gpt_tiny", "model.dropout=0.1")
COMMON = (
    "train.max_steps=9",
    "train.measure_after_step=1",
    "train.checkpoint_every=3",
    "dataset.train_size=90",  # 4 steps per epoch, the last with fewer samples; step 6 is in the middle of one
    "dataset.eval_size=20",
    "cluster.cpus_per_worker=1",
)
RESNET, BLOOM = "model=resnet_tiny", ("model=bloom_tiny", "model.dropout=null")
CELLS: dict[tuple[str, int], dict[str, tuple[str, ...]]] = {
    ("torch", 1): {"single": ("strategy=single",), "sgd": ("strategy=single", "train.optimizer=sgd")},
    ("torch", 2): {
        "ddp": ("strategy=ddp",),
        "full_shard_offload": ("sharding=full_shard", "offload=true"),
        "tied_shard_grad_op_bf16": (*BLOOM, "sharding=shard_grad_op", "precision=bf16"),
        "plain": ("sharding=full_shard", "model.dropout=0"),  # resumed with three workers below
        "batch_norms": (RESNET, "strategy=ddp"),
        "no_checkpoints": ("strategy=ddp", "train.checkpoint_every=null"),
    },
    ("deepspeed", 2): {
        "zero[1]": ("zero_stage=1",),  # DeepSpeed matches folders
        "zero3_offload": ("zero_stage=3", "offload=true"),
        "zero0_fp16": ("zero_stage=0", FP16),
        "zero2_bf16": ("zero_stage=2", "precision=bf16"),
    },
    ("torch_release", 2): {
        "full_shard": ("sharding=full_shard",),
        "hybrid_shard": ("sharding=hybrid_shard", "fsdp.replicas=2"),
        "shard_grad_op_bf16": ("sharding=shard_grad_op", "precision=bf16"),
        "tied": (*BLOOM, "sharding=full_shard"),
    },
    ("deepspeed_release", 2): {
        **{f"zero[{stage}]": (f"zero_stage={stage}",) for stage in (0, 2, 3)},
        "zero0_bf16": ("zero_stage=0", "precision=bf16"),
    },
}


def mark(library: str, workers: int) -> tuple[pytest.MarkDecorator, ...]:
    """Return the mark of the cells of a library and a number of workers."""
    if workers == 1:
        return ()
    return (pytest.mark.release if library.endswith("_release") else pytest.mark.slow,)


NAMES = [(library, workers, name) for (library, workers), cells in CELLS.items() for name in cells]
INTERRUPTED = [pytest.param(*cell, id=cell[2], marks=mark(*cell[:2])) for cell in NAMES if cell[2] != "no_checkpoints"]


def run_cells(folder: Path, workers: int, cells: Cells) -> Path:
    """Run cells in one process group; return their folder."""
    models = {name: () if RESNET in overrides else GPT for name, overrides in cells.items()}
    return run_grid(
        SCRIPT, folder, workers, {name: (*COMMON, *models[name], *overrides) for name, overrides in cells.items()}
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return a function that runs the cells of a library and a number of workers."""
    return run_once(
        tmp_path_factory, lambda folder, library, workers: run_cells(folder, workers, CELLS[library, workers])
    )


def assert_same_training(one: Path, other: Path, rel: float = 1e-6) -> None:
    """Check that two metrics.jsonl files have equal steps."""
    expected, actual = read_lines(one), read_lines(other)
    assert [line["step"] for line in actual] == list(range(1, 10))
    assert [line["step"] for line in expected] == list(range(1, 10))
    for theirs, ours in zip(expected, actual, strict=True):
        for key in ("loss", "grad_norm", "learning_rate", "epoch"):
            skipped = key == "grad_norm" and theirs[key] is None  # with fp16, until the loss scale is low enough
            expected_value = None if skipped else pytest.approx(theirs[key], rel=rel)
            assert ours[key] == expected_value, (key, ours["step"])
    assert expected[-1]["grad_norm"] > 0


@pytest.mark.parametrize(("library", "workers", "name"), INTERRUPTED)
def test_a_resumed_training_equals_an_uninterrupted_one(library: str, workers: int, name: str, runs: Runs) -> None:
    folder = runs(library, workers) / name
    assert_same_training(folder / "uninterrupted.jsonl", folder / "metrics.jsonl")
    uninterrupted, resumed = (RunRecord.read(folder / file).metrics for file in ("uninterrupted.json", "record.json"))
    assert len(uninterrupted.eval_losses) == 3
    for key in ("train_losses", "eval_losses", "train_loss", "eval_loss"):
        assert getattr(resumed, key) == pytest.approx(getattr(uninterrupted, key), rel=1e-6), key
    assert resumed.train_samples_per_second is not None, "two of the three steps were measured"
    events = read_lines(folder / "events.jsonl")
    assert [event["resumed_from_step"] for event in events if "resumed_from_step" in event] == [6]
    assert [disk.step_of(path) for path in disk.list_checkpoints(folder)] == [9, 6], "the newest two are kept"


def test_a_training_that_was_stopped_at_the_end_of_an_epoch_is_resumed(tmp_path: Path) -> None:
    """The loss of the epoch was recorded before the checkpoint. An evaluation would see the request earlier."""
    words = (*COMMON, *GPT, "strategy=single", "train.checkpoint_every=null", "train.evaluate=false")
    run_grid(HELPERS / "stopped_runs.py", tmp_path, 1, {"run": words})
    stopped, resumed = (RunRecord.read(tmp_path / "run" / name) for name in ("stopped.json", "record.json"))
    assert (stopped.status, len(stopped.metrics.train_losses)) == ("preempted", 1)
    assert "stopped after step 4 of 9" in str(stopped.error)
    assert (resumed.status, len(resumed.metrics.train_losses)) == ("completed", 3)
    assert [line["step"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")] == list(range(1, 10))


@pytest.mark.slow
def test_writing_checkpoints_does_not_change_the_training(runs: Runs) -> None:
    folder = runs("torch", 2)
    assert_same_training(folder / "no_checkpoints" / "metrics.jsonl", folder / "ddp" / "uninterrupted.jsonl")
    assert not (folder / "no_checkpoints" / "checkpoints").exists()


@pytest.mark.slow
def test_dropout_changes_the_loss(runs: Runs) -> None:
    """So the tests above fail if the RNG state is not restored."""
    folder = runs("torch", 2)
    with_dropout, without = (
        read_lines(folder / name / "uninterrupted.jsonl")[0]["loss"] for name in ("full_shard_offload", "plain")
    )
    assert with_dropout != pytest.approx(without, rel=1e-4)


@pytest.mark.slow
def test_three_workers_resume_a_checkpoint_of_two(runs: Runs, tmp_path: Path) -> None:
    """A new run with ``train.resume`` uses the newest valid checkpoint."""
    theirs = runs("torch", 2) / "plain"
    source = tmp_path / "source"
    shutil.copytree(theirs, source)
    (shard, *_) = sorted(disk.checkpoint_dir(source, 9).glob("engine/*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    cell = ("sharding=full_shard", "model.dropout=0", f"train.resume={source}", "train.checkpoint_every=null")
    other = (*cell, "train.gradient_accumulation_steps=1")
    folder = run_cells(tmp_path / "cells", 3, {"three": cell, "other": other, "sgd": (*cell, "train.optimizer=sgd")})
    assert_same_training(theirs / "uninterrupted.jsonl", folder / "three" / "metrics.jsonl", rel=1e-5)
    (event,) = [event for event in read_lines(folder / "three" / "events.jsonl") if "resumed_from_step" in event]
    assert event["resumed_from_step"] == 6, "the checkpoint of step 9 is damaged"
    ours, record = (RunRecord.read(path / "record.json") for path in (folder / "three", theirs))
    assert ours.built is not None
    assert ours.built.mesh == [1, 3]
    assert ours.metrics.eval_losses == pytest.approx(record.metrics.eval_losses, rel=1e-5)
    refused = (folder / "other" / "refused.txt").read_text()
    assert "global_batch is 24 instead of 12; steps_per_epoch is 4 instead of 8): make them equal, or leave" in refused
    assert "(train.optimizer is adamw instead of sgd)" in (folder / "sgd" / "refused.txt").read_text()
