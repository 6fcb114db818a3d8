"""Checkpoints of strangers: files that would run code are refused, and nothing runs."""

from __future__ import annotations

import io
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from distexp.checkpoints import folder as disk
from distexp.checkpoints.folder import checksum, list_files
from distexp.config import ConfigError
from distexp.runs.record import RunRecord
from distexp.runs.run_dir import RECORD
from distexp.system.restricted_loading import weights_only_loading
from tests.helpers.runs import run_distexp
from tests.helpers.untrusted import FUNCTION, Command

SHORT = (
    "strategy=single",
    "cluster.device=cpu",
    "model=gpt_tiny",
    "dataset.train_size=40",
    "dataset.eval_size=8",
    "train.micro_batch_size=4",
    "train.max_steps=2",
    "train.checkpoint_every=1",
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the newest checkpoint of a short run."""
    folder = tmp_path_factory.mktemp("source")
    done = run_distexp(*SHORT, "hydra.run.dir=theirs", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return disk.list_checkpoints(folder / "theirs")[0]


def write_metadata(checkpoint: Path, command: Command) -> str:
    """Replace the metadata; return how the message names the file."""
    (checkpoint / "engine" / ".metadata").write_bytes(pickle.dumps(command))
    return "engine/.metadata"


def write_value(checkpoint: Path, command: Command) -> str:
    """Replace a value of the optimizer state that is not a tensor; return how the message names the file."""
    path = checkpoint / "engine" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    index = next(index for index in metadata.storage_data if index.fqn.endswith(".lr"))
    content = io.BytesIO()
    torch.save(command, content)
    storage = metadata.storage_data[index]
    storage.relative_path, storage.offset, storage.length = "added.distcp", 0, len(content.getvalue())
    (checkpoint / "engine" / "added.distcp").write_bytes(content.getvalue())
    path.write_bytes(pickle.dumps(metadata))
    return checkpoint.name


def write_rank_state(checkpoint: Path, command: Command) -> str:
    """Replace the state of rank 0; return how the message names the file."""
    torch.save(command, checkpoint / "rank-00000.pt")
    return checkpoint.name


CRAFTED = {"metadata": write_metadata, "value": write_value, "rank state": write_rank_state}


CASES = [pytest.param(case, marks=() if case == "metadata" else pytest.mark.slow) for case in CRAFTED]


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_with_code_is_refused(case: str, source: Path, tmp_path: Path) -> None:
    checkpoint, marker = tmp_path / source.name, tmp_path / "started"
    shutil.copytree(source, checkpoint)
    named = CRAFTED[case](checkpoint, Command(marker))
    manifest = json.loads((checkpoint / disk.MANIFEST).read_text())
    names = [name for name in list_files(checkpoint) if name != disk.MANIFEST]
    manifest["files"] = {name: checksum(checkpoint / name) for name in names}
    (checkpoint / disk.MANIFEST).write_text(json.dumps(manifest))
    done = run_distexp(*SHORT, f"train.resume={checkpoint}", "hydra.run.dir=mine", cwd=tmp_path)
    assert done.returncode == 1
    assert not marker.exists(), "the command of the stranger ran"
    error = RunRecord.read(tmp_path / "mine" / RECORD).error
    assert error is not None
    assert error.type == "ConfigError"
    assert f"{named} contains {FUNCTION}, which is not data" in error.message
    assert len(error.message.splitlines()) == 1


def test_files_of_deepspeed_are_read_as_data(tmp_path: Path) -> None:
    """DeepSpeed's reader calls ``torch.load`` with ``weights_only=False``."""
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    path = tmp_path / "mp_rank_00_model_states.pt"
    torch.save({"module": Command(tmp_path / "started")}, path)
    with pytest.raises(ConfigError, match=f"{tmp_path} contains {FUNCTION}"), weights_only_loading(tmp_path):
        TorchCheckpointEngine().load(str(path))
    assert not (tmp_path / "started").exists()


@pytest.mark.slow
def test_a_checkpoint_without_code_is_loaded_and_other_settings_are_noted(source: Path, tmp_path: Path) -> None:
    changed = ("train.max_steps=3", "train.learning_rate=0.1", "train.schedule=constant", "train.log_every=1")
    overrides = (*SHORT, f"train.resume={source}", *changed, "hydra.run.dir=mine")
    done = run_distexp(*overrides, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    events = (tmp_path / "mine" / "events.jsonl").read_text()
    assert '"resumed_from_step": 2' in events
    (attempt,) = RunRecord.read(tmp_path / "mine" / RECORD).run.attempts
    assert attempt["changes"] == [
        "train.max_steps was 2 in the checkpoint and is 3 in this run",
        "train.learning_rate was 0.005 in the checkpoint and is 0.1 in this run",
        "train.schedule was 'linear' in the checkpoint and is 'constant' in this run",
    ]
    for change in attempt["changes"]:
        assert f"note: {change}" in done.stdout
