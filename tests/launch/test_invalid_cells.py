"""Tests of the records of invalid cells."""

from __future__ import annotations

import json
from pathlib import Path

from tests.helpers.runs import run_distexp


def test_invalid_cells_show_the_values_that_their_runs_would_have_had(tmp_path: Path) -> None:
    words = ("strategy=single,fsdp", "offload=pinned", "train.micro_batch_size=1,2", "cluster.device=cpu")
    done = run_distexp("--multirun", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.split()[-1:] == ["invalid"]]
    assert rows == [
        ["0", "single", "1", "1", "invalid"],
        ["1", "single", "1", "2", "invalid"],
        ["2", "fsdp", "2", "1", "invalid"],
        ["3", "fsdp", "2", "2", "invalid"],
    ]
    records = [json.loads(path.read_text()) for path in sorted(tmp_path.rglob("record.json"))]
    assert [record["config"]["fsdp"]["sharding"] for record in records] == [None, None, "full_shard", "full_shard"]
