"""``train.resume`` of a directory in which another run trains and deletes its old checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distexp.checkpoints import folder as disk
from distexp.checkpoints import manager
from distexp.checkpoints.folder import CheckpointMeta, Checksums, checkpoint_dir, find_damage
from distexp.config import ConfigError
from tests.helpers.runs import resolve_cell


def write_checkpoint(run_dir: Path, step: int) -> Path:
    folder = checkpoint_dir(run_dir, step)
    folder.mkdir(parents=True)
    (folder / "weights").write_text("weights")
    meta = CheckpointMeta("theirs", step, 10, 4, 100, "torch", 1)
    disk.write_manifest(folder, meta, {"weights": disk.checksum(folder / "weights")}, {})
    return folder


class ReadOnce:
    """A model whose checkpoint is deleted while the model reads it."""

    checkpoint_format = "torch"

    def load(self, folder: Path) -> None:
        """Delete the checkpoint, as the other run does, and fail."""
        shutil.rmtree(folder.parent)
        (folder / "weights").read_text()


def test_deleted_checkpoints_are_passed_over_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, mine = tmp_path / "theirs", tmp_path / "mine"
    old = [write_checkpoint(theirs, step) for step in (1, 2)]

    def replace_while_checked(folder: Path, checksums: Checksums) -> str | None:
        while old:
            shutil.rmtree(old.pop())
        if not checkpoint_dir(theirs, 3).exists():
            write_checkpoint(theirs, 3)
        return find_damage(folder, checksums)

    monkeypatch.setattr(disk, "find_damage", replace_while_checked)
    monkeypatch.setattr(manager, "gather_to_all", lambda value: [value])
    config = resolve_cell("strategy=single", "cluster.device=cpu", f"train.resume={theirs}")
    logger = SimpleNamespace(plan=SimpleNamespace(steps_per_epoch=10, total_steps=20))
    sharding = SimpleNamespace(sharding=SimpleNamespace(global_batch=4))
    inputs: Any = SimpleNamespace(logger=logger, run_id="mine", training=sharding)
    built: Any = SimpleNamespace(parameters=100)
    context: Any = SimpleNamespace(run_dir=mine, rank=0, world_size=1)
    model: Any = ReadOnce()
    with pytest.raises(ConfigError) as caught:
        manager.CheckpointManager(inputs, model, built, config, context).resume()
    (message,) = caught.value.errors
    assert message == (
        f"train.resume: {checkpoint_dir(theirs, 3)} was deleted while it was read, because a run still trains in that "
        "directory: wait for its end, or start again"
    )
