"""Tests of the cost of a trial, and of its overrides."""

from __future__ import annotations

import json
import os
from pathlib import Path

from distexp.choose.trials import gpu_seconds, trial_overrides
from distexp.runs.run_dir import OPERATORS, RECORD, SPEC
from tests.helpers.records import record
from tests.helpers.runs import resolve_cell


def test_the_compilation_of_operators_costs_nothing(tmp_path: Path) -> None:
    """It happens once on a machine, and takes longer than a whole search of a small model."""
    config = resolve_cell("cluster.workers_per_node=2", "cluster.device=cpu")
    for name, seconds in ((SPEC, 1000), (RECORD, 1100)):
        (tmp_path / name).write_text("{}")
        os.utime(tmp_path / name, (seconds, seconds))
    assert gpu_seconds(record(0), tmp_path, config) == 2 * 100
    entries = [{"node": 0, "compiling": "cpu_adam"}, {"node": 0, "compiled_s": 60}, {"node": 1, "waited_s": 90}]
    (tmp_path / OPERATORS).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    assert gpu_seconds(record(0), tmp_path, config) == 2 * 10


def test_a_trial_reads_all_evaluation_samples_if_their_number_is_not_known(tmp_path: Path) -> None:
    """Own data may have fewer than a global batch. Each trial then failed, although none evaluates."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a b c"}\n' * 20)
    own = ("dataset=text", f"dataset.path={rows}", "strategy=ddp", "train.global_batch_size=64")
    for typed, expected in (((), []), (("dataset.eval_size=100",), ["64"]), (("dataset.eval_size=2",), ["2"])):
        found = trial_overrides(resolve_cell("model=gpt_tiny", *own, *typed), steps=5, budget_min=1)
        assert [text.partition("=")[2] for text in found if text.startswith("dataset.eval_size=")] == expected
