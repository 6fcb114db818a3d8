"""Settings in checkpoints, and how they differ from those of a run that resumes."""

from __future__ import annotations

from pathlib import Path

from distexp.checkpoints import folder as disk
from distexp.checkpoints.folder import CheckpointMeta
from distexp.checkpoints.manager import describe_changes, training_settings
from tests.helpers.runs import make_spec

OVERRIDES = ("strategy=single", "cluster.device=cpu")
META = CheckpointMeta("id", 1, 1, 1, 1, "torch", 1)


def test_the_settings_of_a_checkpoint_are_read_as_they_were_written(tmp_path: Path) -> None:
    settings = training_settings(make_spec(*OVERRIDES).config)
    disk.write_manifest(tmp_path, META, {}, settings)
    saved = disk.read_settings(tmp_path)
    assert saved is not None
    assert list(describe_changes(saved, settings)) == []
    other = training_settings(make_spec(*OVERRIDES, "train.gradient_clipping=null", "train.log_every=3").config)
    assert list(describe_changes(saved, other)) == [
        "train.gradient_clipping was 1.0 in the checkpoint and is null in this run"
    ]


def test_a_torn_manifest_has_no_settings(tmp_path: Path) -> None:
    (tmp_path / disk.MANIFEST).write_text('{"settings": 3}')
    assert disk.read_settings(tmp_path) == {}
