"""The script ``docs/results/one_node.sh``, with a program in place of distexp that writes its arguments."""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
from pathlib import Path

from tests.helpers.runs import REPOSITORY

FAKE = """#!/usr/bin/env python3
import json, pathlib, sys
if sys.argv[1] == "-c":
    sys.exit("no altair")
sweep = next(text.partition("=")[2] for text in sys.argv if text.startswith("hydra.sweep.dir="))
run = pathlib.Path(sweep, "0")
run.mkdir(parents=True)
(run / "record.json").write_text(json.dumps(sys.argv[1:]))
(run / "trace.json").write_text("large")
"""
DATA = ("dataset.train_path=T.json", "dataset.eval_path=E.json", "dataset.root=images")


def one_node(folder: Path, *overrides: str, **variables: str) -> subprocess.CompletedProcess[str]:
    program = folder / "python"
    program.write_text(FAKE)
    program.chmod(0o755)
    script = str(REPOSITORY / "docs/results/one_node.sh")
    return subprocess.run(
        ["bash", script, str(folder / "results"), *overrides],
        env={**os.environ, "PYTHON": str(program), **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_exercise_gets_the_files_of_its_data_and_the_archive_its_records(tmp_path: Path) -> None:
    exercises = {"EXERCISES": "fsdp/sharding_two_gpus ddp/multi_gpu", "OUT": str(tmp_path)}
    assert one_node(tmp_path, *DATA, "train.num_epochs=1", **exercises).returncode == 0
    with tarfile.open(tmp_path / "results.tar.gz") as archive:
        archive.extractall(tmp_path / "found", filter="data")
    paths = sorted((tmp_path / "found").glob("*/*/*"))
    found = {str(path.relative_to(tmp_path / "found")): json.loads(path.read_text()) for path in paths}
    assert found == {
        "fsdp_sharding_two_gpus/0/record.json": [
            *("-m", "distexp", *DATA[:2], "train.num_epochs=1", "experiment=fsdp/sharding", "cluster.nodes=1"),
            *("cluster.workers_per_node=2", "offload=false"),
            f"hydra.sweep.dir={tmp_path}/results/fsdp_sharding_two_gpus",
        ],
        "ddp_multi_gpu/0/record.json": [
            *("-m", "distexp", DATA[2], "train.num_epochs=1", "experiment=ddp/multi_gpu"),
            f"hydra.sweep.dir={tmp_path}/results/ddp_multi_gpu",
        ],
    }


def test_no_exercise_starts_after_the_time_limit(tmp_path: Path) -> None:
    done = one_node(tmp_path, *DATA, EXERCISES="fsdp/sharding", BUDGET_S="5")
    assert done.returncode == 1
    assert "no time is left for fsdp/sharding" in done.stdout
    assert list((tmp_path / "results").iterdir()) == []
