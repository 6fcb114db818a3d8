"""Simulated nodes on one machine: the same training, with an agent, logs and a memory trace per node."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from distexp.launch.node_setup import worker_environment
from distexp.runs.record import RunRecord
from distexp.system.typed_values import UNCOUNTED_CPU_PHASES
from tests.helpers.runs import make_spec, run_distexp

COMMON = (
    "train.max_steps=12",
    "train.measure_after_step=1",
    "train.log_every=1",
    "dataset.eval_size=16",
    "cluster.device=cpu",
    "train.seed=3",
)


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def two_by_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nodes") / "run"
    overrides = ("cluster.nodes=2", "cluster.workers_per_node=2", "strategy=fsdp", "sharding=hybrid_shard")
    overrides += ("cluster.environment.GLOO_SOCKET_IFNAME=lo",)
    done = run_distexp(*overrides, *COMMON, "train.micro_batch_size=2", f"hydra.run.dir={folder}")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_two_nodes_of_two_have_the_losses_of_one_worker(two_by_two: Path, tmp_path: Path) -> None:
    overrides = ("strategy=single", *COMMON, "train.micro_batch_size=8", f"hydra.run.dir={tmp_path}/single")
    assert run_distexp(*overrides).returncode == 0
    assert losses(two_by_two) == pytest.approx(losses(tmp_path / "single"), rel=1e-5)


def test_the_mesh_is_nodes_by_workers(two_by_two: Path) -> None:
    built = RunRecord.read(two_by_two / "record.json").built
    assert built is not None
    assert (built.world_size, built.mesh) == (4, [2, 2])


def test_cluster_environment_reaches_the_workers(two_by_two: Path) -> None:
    environment = RunRecord.read(two_by_two / "record.json").environment
    assert environment is not None
    assert environment.variables["GLOO_SOCKET_IFNAME"] == "lo"


def test_ranks_are_numbered_by_node_and_log_their_host(two_by_two: Path) -> None:
    for rank, node in ((0, 0), (1, 0), (2, 1), (3, 1)):
        log = (two_by_two / "logs" / f"node{node}" / f"rank{rank}.log").read_text()
        # torch may print a warning first, for example if another rank is slow to start.
        assert re.search(rf"^rank {rank} of 4: \S+, cpu, rendezvous 127\.0\.0\.1:\d+$", log, re.MULTILINE)


def test_each_node_has_its_memory_in_the_record(two_by_two: Path) -> None:
    record = RunRecord.read(two_by_two / "record.json")
    assert [entry["node"] for entry in record.memory["cpu"]] == [0, 1]
    assert [entry["node"] for entry in record.utilization["cpu"]] == [0, 1]
    for node, entry in enumerate(record.memory["cpu"]):
        with (two_by_two / "memory" / f"node{node}.csv").open() as file:
            rows = list(csv.DictReader(file))
        used = [float(row["used_mib"]) for row in rows if row["kind"] == "cpu" and row["used_mib"]]
        assert min(abs(value - entry["peak_mib"]) for value in used) < 0.01
        counted = [peak for phase, peak in entry["phases"].items() if phase not in UNCOUNTED_CPU_PHASES]
        assert entry["peak_mib"] == max(counted)
        assert entry["peak_mib"] > 200, "two workers with torch"
        # On a busy machine, the first sample may come after the start of the workers, and the short phases in between
        # may have none. The last sample is taken when the workers have ended.
        assert rows[0]["phase"] in ("", "setup")
        assert rows[-1]["phase"] in ("eval", "done")


def test_workers_get_debug_variables_only_with_cluster_debug() -> None:
    spec = make_spec("cluster.nodes=2", "cluster.workers_per_node=2", "cluster.device=cpu", "cluster.debug=true")
    assert worker_environment(spec, 0)["TORCH_DISTRIBUTED_DEBUG"] == "DETAIL"
    assert "TORCH_DISTRIBUTED_DEBUG" not in worker_environment(make_spec("cluster.device=cpu"), 0)


def test_variables_of_the_user_win_over_those_of_debug() -> None:
    spec = make_spec("cluster.device=cpu", "cluster.debug=true", "+cluster.environment.NCCL_DEBUG=TRACE")
    environment = worker_environment(spec, 0)
    assert (environment["NCCL_DEBUG"], environment["TORCH_CPP_LOG_LEVEL"]) == ("TRACE", "INFO")
