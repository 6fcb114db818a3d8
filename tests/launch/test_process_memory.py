"""Tests of local runs whose processes need more memory than the machine has."""

from __future__ import annotations

from pathlib import Path

import pytest

from distexp.launch.local.sweep import process_memory_error
from distexp.runs.record import RunRecord
from tests.helpers.runs import resolve_cell, run_distexp

ENOUGH_SAMPLES = ("dataset.train_size=40000", "train.micro_batch_size=1")


def test_too_many_nodes_are_refused_before_the_start(tmp_path: Path) -> None:
    done = run_distexp(
        "cluster.nodes=20000", "cluster.workers_per_node=2", *ENOUGH_SAMPLES, f"hydra.run.dir={tmp_path}/run"
    )
    assert done.returncode == 2
    assert "cluster.nodes=20000 x cluster.workers_per_node=2 starts 40000 workers on this machine." in done.stderr
    assert "use at most cluster.nodes=" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_too_many_nodes_are_an_invalid_run_of_a_sweep(tmp_path: Path) -> None:
    done = run_distexp(
        "--multirun",
        "cluster.nodes=1,20000",
        *ENOUGH_SAMPLES,
        "train.max_steps=1",
        f"hydra.sweep.dir={tmp_path}",
    )
    assert done.returncode == 0, done.stderr
    assert "without any model, but it has " in done.stdout
    records = [RunRecord.read(tmp_path / number / "record.json") for number in ("0", "1")]
    assert [record.status for record in records] == ["completed", "invalid"]


@pytest.mark.parametrize(
    ("nodes", "workers", "memory_mib", "hint"),
    [
        (4, 2, 4 * 420.0, None),
        (4, 2, 4 * 420.0 - 1, "use at most cluster.nodes=3,"),
        (1, 2, 419.0, "use at most cluster.nodes=1 cluster.workers_per_node=1,"),
        (4, 40, 700.0, "use at most cluster.nodes=1 cluster.workers_per_node=1,"),
        (1, 2, 300.0, "it has 0.3 GiB: use a larger machine,"),
    ],
)
def test_the_largest_number_that_fits_is_named(nodes: int, workers: int, memory_mib: float, hint: str | None) -> None:
    config = resolve_cell(
        "strategy=ddp", f"cluster.workers_per_node={workers}", f"cluster.nodes={nodes}", "dataset.train_size=9999"
    )
    error = process_memory_error(config, memory_mib)
    assert error is None if hint is None else hint in str(error)
