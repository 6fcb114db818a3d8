"""Tests of the preflight: measurements before training, and the threshold that stops a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from distexp.runs.record import RunRecord
from tests.helpers.runs import run_distexp, run_module

SMALL = ("preflight.max_bytes=65536", "preflight.rounds=3", "preflight.warmup_rounds=1")
FACTORS = {"all_reduce": 2 * 3 / 4, "all_gather": 3 / 4, "reduce_scatter": 3 / 4, "send_receive": 1.0}


def test_preflight_measures_every_group_and_collective(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = run_module(
        "distexp.preflight", *SMALL, "cluster.nodes=2", "cluster.workers_per_node=2", f"hydra.run.dir={run}"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("preflight with 4 cpu workers on 2 nodes\n")
    record = RunRecord.read(run / "record.json")
    assert record.status == "completed"
    assert record.metrics.train_loss is None
    assert record.preflight is not None
    measured = record.preflight["measurements"]
    assert {one["group"] for one in measured} == {"all", "node 0", "node 1", "across nodes"}
    assert all(one["correct"] for one in measured)
    for operation, factor in FACTORS.items():
        results = [one for one in measured if one["group"] == "all" and one["operation"] == operation]
        assert [one["bytes"] for one in results] == [1024, 4096, 16384, 65536]
        for one in results:
            assert one["algbw_gbps"] == pytest.approx(one["bytes"] / one["seconds"] / 1e9)
            assert one["busbw_gbps"] == pytest.approx(one["algbw_gbps"] * factor)
    assert "bus bandwidth" in done.stdout
    assert "matrix ceiling" in done.stdout
    assert [one["precision"] for one in record.preflight["matrix_products"]] == ["fp32"] * 4
    assert all(one["tflops"] > 0 for one in record.preflight["matrix_products"])
    assert "FLOP/s in a large fp32 matrix product" in (run / "logs" / "node0" / "rank0.log").read_text()


@pytest.mark.slow
def test_slow_interconnect_stops_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    overrides = (*SMALL, "preflight.enabled=true", "preflight.min_busbw_gbps=1000", "cluster.workers_per_node=2")
    done = run_distexp(*overrides, f"hydra.run.dir={run}")
    assert done.returncode == 1
    record = RunRecord.read(run / "record.json")
    assert (record.status, record.error and record.error.phase) == ("failed", "preflight")
    assert record.error is not None
    assert "below preflight.min_busbw_gbps=1000" in record.error.message
    assert record.preflight is not None
    assert not (run / "metrics.jsonl").exists(), "it trained"
